package authz

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	authzconfig "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	authorizationcel "k8s.io/apiserver/pkg/authorization/cel"
	"k8s.io/apiserver/pkg/authorization/union"
	authorizationconfigmetrics "k8s.io/apiserver/pkg/server/options/authorizationconfig/metrics"
	kubeauthorizer "k8s.io/kubernetes/pkg/kubeapiserver/authorizer"
	"k8s.io/kubernetes/pkg/kubeapiserver/authorizer/modes"

	"watershed.dev/platform/reload"
)

// serverID labels upstream's metrics of reloads.
const serverID = "watershed"

// chain is the authorizers in the order configured. They are upstream's, each built by upstream's own code with a
// configuration of it alone: so the chain knows which ones a decision came from, and a configuration that is read anew
// keeps those that hold state.
type chain struct {
	base kubeauthorizer.Config
	// required are the types that a new configuration must still name, as upstream wants it.
	required sets.Set[authzconfig.AuthorizerType]
	compiler authorizationcel.Compiler
	links    atomic.Pointer[[]link]
	// onReload is called after a new configuration is in force.
	onReload func()

	mu         sync.Mutex // guards what follows
	built      map[authzconfig.AuthorizerType]link
	lastConfig *authzconfig.AuthorizationConfiguration
}

// link is one authorizer.
type link struct {
	authorizer.Authorizer
	authorizer.RuleResolver
	// webhook: it asks another server, whose answers change without a word. How long they are kept is its own matter.
	webhook bool
}

// newChain builds the authorizers of a configuration, which ToAuthorizationConfig fills from flags and files alike, and
// has the files followed.
func newChain(ctx context.Context, c *kubeauthorizer.Config, files *reload.Files, onReload func()) (*chain, error) {
	h := &chain{
		base:       *c,
		required:   sets.New[authzconfig.AuthorizerType](),
		compiler:   authorizationcel.NewDefaultCompiler(),
		onReload:   onReload,
		built:      map[authzconfig.AuthorizerType]link{},
		lastConfig: c.AuthorizationConfiguration,
	}
	for _, a := range c.AuthorizationConfiguration.Authorizers {
		if a.Type != authzconfig.TypeWebhook {
			h.required.Insert(a.Type)
		}
	}
	authorizationconfigmetrics.RegisterMetrics() // it makes what recording needs
	if err := h.watchFiles(files); err != nil {  // first: what changes while they are built is read again
		return nil, err
	}
	return h, h.build(ctx, c.AuthorizationConfiguration, true)
}

// has says whether an authorizer of a type that holds state is in the chain, or was.
func (h *chain) has(t authzconfig.AuthorizerType) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.built[t]
	return ok
}

// build puts a configuration in force. At the start every type may be made; later only those that hold no state.
func (h *chain) build(ctx context.Context, c *authzconfig.AuthorizationConfiguration, first bool) error {
	if len(c.Authorizers) == 0 {
		return errors.New("at least one authorization mode must be passed")
	}
	var links []link
	for _, a := range c.Authorizers {
		l, err := h.newLink(ctx, a, first)
		if err != nil {
			return err
		}
		links = append(links, l)
	}
	h.links.Store(&links)
	return nil
}

func (h *chain) newLink(ctx context.Context, a authzconfig.AuthorizerConfiguration, first bool) (link, error) {
	if l, ok := h.built[a.Type]; ok {
		return l, nil
	}
	if !first && (a.Type == "Node" || a.Type == "RBAC" || a.Type == "ABAC") {
		return link{}, fmt.Errorf("authorizer type %s is not allowed if it was not enabled at initial server startup",
			a.Type)
	}
	c := h.base
	c.ReloadFile, c.InitialAuthorizationConfigurationData = "", ""
	c.AuthorizationConfiguration = &authzconfig.AuthorizationConfiguration{
		Authorizers: []authzconfig.AuthorizerConfiguration{a},
	}
	built, rules, err := c.New(ctx, serverID)
	if err != nil {
		return link{}, err
	}
	l := link{Authorizer: built, RuleResolver: rules, webhook: a.Type == authzconfig.TypeWebhook}
	if !l.webhook {
		h.built[a.Type] = l
	}
	return l, nil
}

// decide asks one authorizer after the other, as k8s.io/apiserver/pkg/authorization/union does. keep says whether the
// decision stands until the policy that this service follows moves: not where a webhook was asked, whose own cache has
// its own lifetime, and not where any authorizer erred.
func (h *chain) decide(ctx context.Context,
	a authorizer.Attributes) (d authorizer.Decision, reason string, cacheable bool, err error) {
	cacheable = true
	var reasons []string
	var errs []error
	for _, l := range *h.links.Load() {
		d, reason, err := l.Authorize(ctx, a)
		if l.webhook || err != nil {
			cacheable = false
		}
		if d == authorizer.DecisionAllow || d == authorizer.DecisionDeny {
			return d, reason, cacheable, err
		}
		if err != nil {
			errs = append(errs, err)
		}
		if reason != "" {
			reasons = append(reasons, reason)
		}
	}
	return authorizer.DecisionNoOpinion, strings.Join(reasons, "\n"), cacheable, utilerrors.NewAggregate(errs)
}

// unmatchedName is a name that no rule holds.
var unmatchedName = rand.Text()

// wildcard says whether what is allowed for an object is so whatever its name is, and whatever its namespace: then whoever
// walks ten thousand objects is asked about once.
//
// A rule of RBAC that allows a name which nobody can have written names no objects, and what is allowed without a
// namespace is so by cluster role bindings alone: either allow the rest too. ABAC's lines know no names, but "" among
// their namespaces is not all of them. No other authorizer that a decision is kept of looks at either; Node has no
// opinion but of nodes. Who asks another server is not asked about what nobody has asked.
func (h *chain) wildcard(
	ctx context.Context,
	attrs authorizer.AttributesRecord,
) (wildcardName, wildcardNamespace bool) {
	if !attrs.ResourceRequest || attrs.Name == "" && attrs.Namespace == "" {
		return false, false
	}
	allows := func(namespace string) bool {
		probe := attrs
		probe.Name, probe.Namespace = unmatchedName, namespace
		for _, l := range *h.links.Load() {
			if l.webhook {
				return false
			}
			if d, _, err := l.Authorize(ctx, probe); err != nil || d != authorizer.DecisionNoOpinion {
				return err == nil && d == authorizer.DecisionAllow
			}
		}
		return false
	}
	if attrs.Namespace != "" && !h.has(abacType) && allows("") {
		return true, true
	}
	return attrs.Name != "" && allows(attrs.Namespace), false
}

// RulesFor implements authorizer.RuleResolver.
func (h *chain) RulesFor(ctx context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo,
	[]authorizer.NonResourceRuleInfo, bool, error) {
	var all []authorizer.RuleResolver
	for _, l := range *h.links.Load() {
		all = append(all, l.RuleResolver)
	}
	return union.NewRuleResolvers(all...).RulesFor(ctx, u, namespace)
}

// watchFiles has the files that the authorizers are made of read anew whenever they change. A bad one is told of, and the
// old one stays in force (k8s.io/kubernetes/pkg/kubeapiserver/authorizer/reload.go; that of ABAC and those that name
// webhooks kube-apiserver reads once).
func (h *chain) watchFiles(files *reload.Files) error {
	if file := h.base.ReloadFile; file != "" {
		data := h.base.InitialAuthorizationConfigurationData
		authorizationconfigmetrics.RecordAuthorizationConfigLastConfigInfo(serverID, data)
		files.Add("authorization-config", file, []byte(data), func(ctx context.Context, data []byte) error {
			if err := h.reload(ctx, data); err != nil {
				authorizationconfigmetrics.RecordAuthorizationConfigAutomaticReloadFailure(serverID)
				return err
			}
			authorizationconfigmetrics.RecordAuthorizationConfigAutomaticReloadSuccess(serverID, string(data))
			return nil
		})
	}
	for _, a := range h.lastConfig.Authorizers {
		flag, file := "", ""
		switch {
		case a.Type == abacType:
			flag, file = "authorization-policy-file", h.base.PolicyFile
		case a.Webhook != nil && a.Webhook.ConnectionInfo.KubeConfigFile != nil:
			flag, file = "authorization-webhook-config-file", *a.Webhook.ConnectionInfo.KubeConfigFile
			if h.base.ReloadFile != "" {
				flag = "authorization-config" // which names it
			}
		}
		if err := files.Watch(flag, file, func(ctx context.Context, _ []byte) error {
			return h.rebuild(ctx, a.Type)
		}); err != nil {
			return err
		}
	}
	return nil
}

const abacType = authzconfig.AuthorizerType(modes.ModeABAC)

// rebuild makes the authorizers of a type anew from their files: ABAC, or the webhooks.
func (h *chain) rebuild(ctx context.Context, authorizerType authzconfig.AuthorizerType) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	old, existed := h.built[authorizerType]
	delete(h.built, authorizerType)
	links := slices.Clone(*h.links.Load())
	for i, a := range h.lastConfig.Authorizers {
		if a.Type != authorizerType {
			continue
		}
		var err error
		if links[i], err = h.newLink(ctx, a, true); err != nil {
			if existed {
				h.built[authorizerType] = old
			}
			return err
		}
	}
	h.links.Store(&links)
	h.onReload()
	return nil
}

// reload puts a configuration in force.
func (h *chain) reload(ctx context.Context, data []byte) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	c, err := kubeauthorizer.LoadAndValidateData(data, h.compiler, h.required)
	if err != nil || reflect.DeepEqual(c, h.lastConfig) {
		return err
	}
	if err := h.build(ctx, c, false); err != nil {
		return err
	}
	h.lastConfig = c
	h.onReload()
	return nil
}
