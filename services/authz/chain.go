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

// serverID is the label of upstream's reload metrics.
const serverID = "watershed"

// chain is the authorizers in the configured order. Upstream's code builds each of them from a configuration with only
// that authorizer. The chain therefore can identify the authorizers of a decision, and a reload keeps the authorizers
// that hold state.
type chain struct {
	base kubeauthorizer.Config
	// required are the types that a new configuration must still have, as upstream requires.
	required sets.Set[authzconfig.AuthorizerType]
	compiler authorizationcel.Compiler
	links    atomic.Pointer[[]link]
	// onReload is called after a new configuration has been applied.
	onReload func()

	mu         sync.Mutex // guards the fields below
	built      map[authzconfig.AuthorizerType]link
	lastConfig *authzconfig.AuthorizationConfiguration
}

// link is one authorizer of the chain.
type link struct {
	authorizer.Authorizer
	authorizer.RuleResolver
	// webhook means that the authorizer calls another server, whose responses may change at any time. Its own cache has
	// their TTL.
	webhook bool
}

// newChain builds the authorizers of a configuration and watches its files. ToAuthorizationConfig fills the
// configuration from flags and files.
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
	authorizationconfigmetrics.RegisterMetrics() // initializes upstream's metrics before the first recording
	if err := h.watchFiles(files); err != nil {  // before build, so that a concurrent change is read again
		return nil, err
	}
	return h, h.build(ctx, c.AuthorizationConfiguration, true)
}

// has reports whether the chain has, or had, an authorizer of a type that holds state.
func (h *chain) has(t authzconfig.AuthorizerType) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.built[t]
	return ok
}

// build applies a configuration. At the start it may build every type; later only types without state.
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

// decide calls the authorizers in order, as k8s.io/apiserver/pkg/authorization/union does. cacheable reports whether
// the decision holds until the policy revision changes. It is false after a call of a webhook, because the webhook's
// cache has a TTL of its own, and after an error.
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

// unmatchedName is a random name that no rule contains.
var unmatchedName = rand.Text()

// wildcard reports whether an allowed decision holds for every name, and for every namespace. The gateway then needs
// one decision for a client that reads ten thousand objects. reason is the decision's reason for other names, which
// another rule may allow.
//
// An RBAC rule that allows a random name does not restrict names. A permission without a namespace comes from a
// ClusterRoleBinding. Both therefore hold for all names or namespaces. ABAC lines do not restrict names, but an empty
// namespace in a line does not mean all namespaces. Other authorizers with cacheable decisions ignore names and
// namespaces; Node has no opinion on other users. Webhooks are never called with such a probe, because no client sent
// it.
func (h *chain) wildcard(
	ctx context.Context,
	attrs authorizer.AttributesRecord,
) (wildcardName, wildcardNamespace bool, reason string) {
	if !attrs.ResourceRequest || attrs.Name == "" && attrs.Namespace == "" {
		return false, false, ""
	}
	allows := func(namespace string) bool {
		probe := attrs
		probe.Name, probe.Namespace = unmatchedName, namespace
		for _, l := range *h.links.Load() {
			if l.webhook {
				return false
			}
			d, why, err := l.Authorize(ctx, probe)
			if err == nil && d == authorizer.DecisionAllow {
				reason = why
				return true
			}
			if err != nil || d != authorizer.DecisionNoOpinion {
				return false
			}
		}
		return false
	}
	if attrs.Namespace != "" && !h.has(abacType) && allows("") {
		return true, true, reason
	}
	return attrs.Name != "" && allows(attrs.Namespace), false, reason
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

// watchFiles reloads the authorizers' files after each change. An invalid file is reported, and the old configuration
// stays in force (k8s.io/kubernetes/pkg/kubeapiserver/authorizer/reload.go). kube-apiserver reads the ABAC file and
// webhook kubeconfigs only once.
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
				flag = "authorization-config" // the file that names it
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

// rebuild builds the authorizers of a type again from their files: ABAC or the webhooks.
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

// reload applies a new configuration.
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
