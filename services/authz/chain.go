package authz

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	authzconfig "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	authorizationcel "k8s.io/apiserver/pkg/authorization/cel"
	"k8s.io/apiserver/pkg/authorization/union"
	authorizationconfigmetrics "k8s.io/apiserver/pkg/server/options/authorizationconfig/metrics"
	"k8s.io/apiserver/pkg/util/filesystem"
	kubeauthorizer "k8s.io/kubernetes/pkg/kubeapiserver/authorizer"
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
	// reloaded is called after a new configuration is in force.
	reloaded func()

	mu       sync.Mutex // guards what follows
	made     map[authzconfig.AuthorizerType]link
	lastData []byte
	last     *authzconfig.AuthorizationConfiguration
}

// link is one authorizer.
type link struct {
	authorizer.Authorizer
	authorizer.RuleResolver
	// asks: it asks another server, whose answers change without a word. How long they are kept is its own matter.
	asks bool
}

// newChain builds the authorizers of a configuration, which ToAuthorizationConfig fills from flags and files alike.
func newChain(ctx context.Context, c *kubeauthorizer.Config, reloaded func()) (*chain, error) {
	h := &chain{
		base:     *c,
		required: sets.New[authzconfig.AuthorizerType](),
		compiler: authorizationcel.NewDefaultCompiler(),
		reloaded: reloaded,
		made:     map[authzconfig.AuthorizerType]link{},
		lastData: []byte(c.InitialAuthorizationConfigurationData),
		last:     c.AuthorizationConfiguration,
	}
	for _, a := range c.AuthorizationConfiguration.Authorizers {
		if a.Type != authzconfig.TypeWebhook {
			h.required.Insert(a.Type)
		}
	}
	authorizationconfigmetrics.RegisterMetrics() // it makes what recording needs
	return h, h.build(ctx, c.AuthorizationConfiguration, true)
}

// has says whether an authorizer of a type that holds state is in the chain, or was.
func (h *chain) has(t authzconfig.AuthorizerType) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.made[t]
	return ok
}

// build puts a configuration in force. At the start every type may be made; later only those that hold no state.
func (h *chain) build(ctx context.Context, c *authzconfig.AuthorizationConfiguration, first bool) error {
	if len(c.Authorizers) == 0 {
		return errors.New("at least one authorization mode must be passed")
	}
	var links []link
	for _, a := range c.Authorizers {
		l, err := h.link(ctx, a, first)
		if err != nil {
			return err
		}
		links = append(links, l)
	}
	h.links.Store(&links)
	return nil
}

func (h *chain) link(ctx context.Context, a authzconfig.AuthorizerConfiguration, first bool) (link, error) {
	if l, ok := h.made[a.Type]; ok {
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
	made, rules, err := c.New(ctx, serverID)
	if err != nil {
		return link{}, err
	}
	l := link{Authorizer: made, RuleResolver: rules, asks: a.Type == authzconfig.TypeWebhook}
	if !l.asks {
		h.made[a.Type] = l
	}
	return l, nil
}

// decide asks one authorizer after the other, as k8s.io/apiserver/pkg/authorization/union does. keep says whether the
// decision stands until the policy that this service follows moves: not where a webhook was asked, whose own cache has
// its own lifetime, and not where any authorizer erred.
func (h *chain) decide(ctx context.Context,
	a authorizer.Attributes) (d authorizer.Decision, reason string, keep bool, err error) {
	keep = true
	var reasons []string
	var errs []error
	for _, l := range *h.links.Load() {
		d, reason, err := l.Authorize(ctx, a)
		if l.asks || err != nil {
			keep = false
		}
		if d == authorizer.DecisionAllow || d == authorizer.DecisionDeny {
			return d, reason, keep, err
		}
		if err != nil {
			errs = append(errs, err)
		}
		if reason != "" {
			reasons = append(reasons, reason)
		}
	}
	return authorizer.DecisionNoOpinion, strings.Join(reasons, "\n"), keep, utilerrors.NewAggregate(errs)
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

// watchFile reads the configuration's file anew whenever it changes, until ctx is done. A bad one is told of, and the
// old one stays in force (k8s.io/kubernetes/pkg/kubeapiserver/authorizer/reload.go).
func (h *chain) watchFile(ctx context.Context) {
	if h.base.ReloadFile == "" {
		return
	}
	authorizationconfigmetrics.RecordAuthorizationConfigLastConfigInfo(serverID, string(h.lastData))
	filesystem.WatchUntil(ctx, time.Minute, h.base.ReloadFile, func() {
		if err := h.reload(ctx); err != nil {
			authorizationconfigmetrics.RecordAuthorizationConfigAutomaticReloadFailure(serverID)
			slog.Error("--authorization-config was not read anew; what was read before stays in force", "file",
				h.base.ReloadFile, "error", err)
		}
	}, func(err error) {
		slog.Error("--authorization-config cannot be watched", "file", h.base.ReloadFile, "error", err)
	})
}

func (h *chain) reload(ctx context.Context) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	data, err := os.ReadFile(h.base.ReloadFile)
	if err != nil || bytes.Equal(data, h.lastData) {
		return err
	}
	h.lastData = data // also of one that is bad: it does not become better
	c, err := kubeauthorizer.LoadAndValidateData(data, h.compiler, h.required)
	if err != nil || reflect.DeepEqual(c, h.last) {
		return err
	}
	if err := h.build(ctx, c, false); err != nil {
		return err
	}
	h.last = c
	authorizationconfigmetrics.RecordAuthorizationConfigAutomaticReloadSuccess(serverID, string(data))
	slog.Info("--authorization-config was read anew", "file", h.base.ReloadFile)
	h.reloaded()
	return nil
}
