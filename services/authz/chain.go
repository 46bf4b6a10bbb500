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
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	authorizationcel "k8s.io/apiserver/pkg/authorization/cel"
	"k8s.io/apiserver/pkg/authorization/union"
	authorizationconfigmetrics "k8s.io/apiserver/pkg/server/options/authorizationconfig/metrics"
	"k8s.io/client-go/informers"
	"k8s.io/kubernetes/pkg/auth/authorizer/abac"
	kubeauthorizer "k8s.io/kubernetes/pkg/kubeapiserver/authorizer"
	"k8s.io/kubernetes/pkg/kubeapiserver/authorizer/modes"
	"k8s.io/kubernetes/plugin/pkg/auth/authorizer/rbac"

	"watershed.dev/platform/reload"
)

// serverID is the label of upstream's reload metrics.
const serverID = "watershed"

// chain is the authorizers in the configured order. Upstream's code builds each of them from a configuration with only
// that authorizer. The chain therefore can identify the authorizers of a decision, and a reload keeps the authorizers
// that hold state.
type chain struct {
	base kubeauthorizer.Config
	// required are the types of the first configuration, except Webhook. As upstream requires, a new configuration must
	// still have them. It cannot add a type that holds state.
	required sets.Set[authzconfig.AuthorizerType]
	compiler authorizationcel.Compiler
	links    atomic.Pointer[[]link]
	// onReload is called after a new configuration has been applied.
	onReload func()

	mu         sync.Mutex // held by reloads; guards lastConfig
	lastConfig *authzconfig.AuthorizationConfiguration
}

// link is one authorizer of the chain.
type link struct {
	authorizer.Authorizer
	authorizer.RuleResolver
	// probe is the authorizer without upstream's metrics.
	probe         authorizer.Authorizer
	configuration authzconfig.AuthorizerConfiguration
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

// has reports whether the first configuration has an authorizer of a type other than Webhook. A reload cannot remove
// it.
func (h *chain) has(t authzconfig.AuthorizerType) bool { return h.required.Has(t) }

// build applies a configuration. At the start it may build every type; later only types without state. It keeps the
// authorizers of the current configuration, except webhooks.
func (h *chain) build(ctx context.Context, c *authzconfig.AuthorizationConfiguration, first bool) error {
	if len(c.Authorizers) == 0 {
		return errors.New("at least one authorization mode must be passed")
	}
	var current, links []link
	if p := h.links.Load(); p != nil {
		current = *p
	}
	for _, a := range c.Authorizers {
		i := slices.IndexFunc(current, func(l link) bool { return l.configuration.Type == a.Type && !l.webhook })
		if i >= 0 {
			links = append(links, current[i])
			continue
		}
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
	if !first && (a.Type == "Node" || a.Type == rbacType || a.Type == abacType) {
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
	l := link{Authorizer: built, RuleResolver: rules, configuration: a, webhook: a.Type == authzconfig.TypeWebhook}
	l.probe, err = withoutMetrics(built, a.Type, &c)
	return l, err
}

// withoutMetrics returns an authorizer like built, without upstream's metrics. It reads the file of ABAC again;
// watchFiles reads a change between the two reads again.
func withoutMetrics(built authorizer.Authorizer, t authzconfig.AuthorizerType,
	c *kubeauthorizer.Config) (authorizer.Authorizer, error) {
	switch t {
	case rbacType:
		return newRBAC(c.VersionedInformerFactory), nil
	case abacType:
		return abac.NewFromFile(c.PolicyFile)
	case alwaysAllowType:
		return authorizerfactory.NewAlwaysAllowAuthorizer(), nil
	}
	return built, nil
}

// newRBAC returns RBAC without metrics, over the listers of kubeauthorizer.Config.New.
func newRBAC(f informers.SharedInformerFactory) authorizer.Authorizer {
	v1 := f.Rbac().V1()
	return rbac.New(
		&rbac.RoleGetter{Lister: v1.Roles().Lister()},
		&rbac.RoleBindingLister{Lister: v1.RoleBindings().Lister()},
		&rbac.ClusterRoleGetter{Lister: v1.ClusterRoles().Lister()},
		&rbac.ClusterRoleBindingLister{Lister: v1.ClusterRoleBindings().Lister()},
	)
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
// it. apiserver_authorization_decisions_total does not count probes.
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
			d, why, err := l.probe.Authorize(ctx, probe)
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
			return nil
		})
	}
	for _, a := range h.lastConfig.Authorizers {
		flag := "authorization-webhook-config-file"
		if a.Type == abacType {
			flag = "authorization-policy-file"
		} else if h.base.ReloadFile != "" {
			flag = "authorization-config" // the file that names it
		}
		file := h.fileOf(a)
		if err := files.Watch(flag, file, func(ctx context.Context, _ []byte) error {
			return h.rebuild(ctx, file)
		}); err != nil {
			return err
		}
	}
	return nil
}

const (
	abacType        = authzconfig.AuthorizerType(modes.ModeABAC)
	rbacType        = authzconfig.AuthorizerType(modes.ModeRBAC)
	alwaysAllowType = authzconfig.AuthorizerType(modes.ModeAlwaysAllow)
)

// fileOf returns the file that an authorizer is built from: the policy of ABAC, or a webhook's kubeconfig.
func (h *chain) fileOf(a authzconfig.AuthorizerConfiguration) string {
	switch {
	case a.Type == abacType:
		return h.base.PolicyFile
	case a.Webhook != nil && a.Webhook.ConnectionInfo.KubeConfigFile != nil:
		return *a.Webhook.ConnectionInfo.KubeConfigFile
	}
	return ""
}

// rebuild builds the authorizers of a file again. A kubeconfig is read again after an error, because the files that it
// names may become valid, or a reload of the configuration may make it active.
func (h *chain) rebuild(ctx context.Context, file string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	links := slices.Clone(*h.links.Load())
	for i, l := range links {
		if h.fileOf(l.configuration) != file {
			continue
		}
		next, err := h.newLink(ctx, l.configuration, true)
		if err != nil && l.webhook {
			return reload.Retryable(err)
		} else if err != nil {
			return err
		}
		links[i] = next
	}
	h.links.Store(&links)
	h.onReload()
	return nil
}

// reload applies a new configuration. As in upstream, a configuration with other comments is not new.
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
	authorizationconfigmetrics.RecordAuthorizationConfigAutomaticReloadSuccess(serverID, string(data))
	return nil
}
