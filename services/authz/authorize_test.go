package authz

import (
	"context"
	"errors"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	kubefeatures "k8s.io/kubernetes/pkg/features"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/identity"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

// serviceOf returns a service over a chain. If bound is 0, its policies may have any age; otherwise they were never
// read.
func serviceOf(t *testing.T, c *chain, bound time.Duration) *Service {
	t.Helper()
	cluster, err := apiclient.NewCluster(&apiclient.Conn{Config: &rest.Config{Host: "https://nowhere.invalid"}},
		apiclient.Freshness{Bound: bound})
	if err != nil {
		t.Fatal(err)
	}
	s := &Service{
		chain:           c,
		cluster:         cluster,
		policyRevisions: newPolicyRevisions(),
		privileged:      authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup),
	}
	s.synced.Store(true)
	return s
}

// Every decision names its policy revision, whether it is cacheable or not. An open watch ignores decisions of a
// replica that is behind.
func TestADecisionNamesItsPolicyRevision(t *testing.T) {
	h := newHook(t)
	h.allow.Store(true)
	allows := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) { o.Modes = []string{"RBAC", "AlwaysAllow"} })
	webhook := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes, o.WebhookConfigFile = []string{"RBAC", "Webhook"}, h.kubeconfig
		o.WebhookRetryBackoff.Steps = 1
	})
	for name, c := range map[string]struct {
		chain               *chain
		user                string
		groups              []string
		transient, anywhere bool
	}{
		"a user":      {chain: allows, user: "bob"},
		"a node":      {chain: allows, user: "system:node:n", groups: []string{user.NodesGroup}, transient: true},
		"a webhook's": {chain: webhook, user: "bob", transient: true},
		"a master":    {chain: allows, user: "root", groups: []string{user.SystemPrivilegedGroup}, anywhere: true},
		"of the system": {
			chain:    allows,
			user:     identity.Authz,
			groups:   []string{identity.ServicesGroup},
			anywhere: true,
		},
		"another master": {chain: webhook, user: "root", groups: []string{user.SystemPrivilegedGroup}, anywhere: true},
	} {
		t.Run(name, func(t *testing.T) {
			d, err := serviceOf(t, c.chain, 0).Authorize(t.Context(),
				&authzv1.AuthorizeRequest{Attributes: identity.AttributesProto(attributesOf(c.user, c.groups...))})
			if err != nil || d.Decision != authzv1.Decision_DECISION_ALLOW || d.Transient != c.transient ||
				(d.PolicyRevision == 0) != c.anywhere {
				t.Errorf("%v, %v", d, err)
			}
			if c.anywhere != (d.CacheMilliseconds > 0) {
				t.Errorf("it is cached for %d ms", d.CacheMilliseconds)
			}
		})
	}
}

// revisionStream cancels its context at the first message, which it keeps.
type revisionStream struct {
	grpc.ServerStreamingServer[authzv1.PolicyRevision]
	ctx    context.Context
	cancel context.CancelFunc
	first  *authzv1.PolicyRevision
}

func (s *revisionStream) Context() context.Context { return s.ctx }

func (s *revisionStream) Send(g *authzv1.PolicyRevision) error {
	s.first = g
	s.cancel()
	return nil
}

// AlwaysAllow denies anonymous clients, although authn may accept them. Authenticated clients may impersonate and
// review the anonymous user.
func TestAlwaysAllowDeniesAnonymousClients(t *testing.T) {
	s := serviceOf(t, chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes = []string{"AlwaysAllow"}
	}), 0)
	s.rejectsAnonymous = true
	for _, x := range []struct {
		user          string
		authenticated bool
		allowed       bool
	}{{user.Anonymous, false, false}, {user.Anonymous, true, true}, {"bob", false, true}, {"bob", true, true}} {
		d, err := s.Authorize(t.Context(), &authzv1.AuthorizeRequest{
			Attributes:          identity.AttributesProto(attributesOf(x.user)),
			ClientAuthenticated: x.authenticated,
		})
		if err != nil || (d.Decision == authzv1.Decision_DECISION_ALLOW) != x.allowed {
			t.Errorf("%v: %v, %v", x, d, err)
		}
	}
	stream := &revisionStream{}
	stream.ctx, stream.cancel = context.WithCancel(t.Context())
	if err := s.PolicyRevisions(nil, stream); !errors.Is(err, context.Canceled) || !stream.first.RejectsAnonymous {
		t.Errorf("the gateway receives %v, %v", stream.first, err)
	}
}

// newService returns a service with a configuration. Its cluster is unavailable.
func newService(t *testing.T, set func(*kubeoptions.BuiltInAuthorizationOptions)) *Service {
	t.Helper()
	c := NewConfig()
	set(c.Options)
	s, err := New(t.Context(), c, &apiclient.Conn{Config: &rest.Config{Host: "https://nowhere.invalid"}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Only --authorization-mode=AlwaysAllow rejects anonymous clients, as in kube-apiserver.
func TestAlwaysAllowOfAFileAllowsAnonymousClients(t *testing.T) {
	file := filepath.Join(t.TempDir(), "authz.yaml")
	if err := os.WriteFile(file, []byte("apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\n"+
		"authorizers: [{type: AlwaysAllow, name: alwaysallow}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if newService(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.AuthorizationConfigurationFile = file
	}).rejectsAnonymous {
		t.Error("AlwaysAllow of a file rejects anonymous clients")
	}
	if !newService(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes = []string{"RBAC", "AlwaysAllow"}
	}).rejectsAnonymous {
		t.Error("the mode AlwaysAllow does not reject anonymous clients")
	}
}

// The age of a resource counts only if an authorizer reads the resource.
func TestTheAgeOfReadResourcesCounts(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, kubefeatures.PodCertificateRequest,
		true)
	const rbac = " roles rolebindings clusterroles clusterrolebindings"
	const node = " pods persistentvolumes volumeattachments resourceslices podcertificaterequests"
	for modes, want := range map[string]string{"RBAC": rbac, "Node": node, "Node,RBAC": rbac + node, "AlwaysAllow": ""} {
		s := newService(t, func(o *kubeoptions.BuiltInAuthorizationOptions) { o.Modes = strings.Split(modes, ",") })
		var got []string
		for _, tracked := range []map[string]cache.SharedIndexInformer{s.rbacInformers(), s.nodeInformers()} {
			for p := range tracked {
				got = append(got, path.Base(p))
			}
		}
		if expected := strings.Fields(want); !sets.New(got...).Equal(sets.New(expected...)) {
			t.Errorf("%s: %v, want %v", modes, got, expected)
		}
	}
}

// failingStream is a stream that fails the test on Send.
type failingStream struct {
	grpc.ServerStreamingServer[authzv1.PolicyRevision]
	ctx context.Context
	t   *testing.T
}

func (s *failingStream) Context() context.Context { return s.ctx }

func (s *failingStream) Send(g *authzv1.PolicyRevision) error {
	s.t.Errorf("sent %v", g)
	return nil
}

// While the policies are stale, no decision is made and no policy revision is sent.
func TestStalePolicyDecidesNothing(t *testing.T) {
	s := serviceOf(t, chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes = []string{"AlwaysAllow"}
	}), time.Second)
	request := &authzv1.AuthorizeRequest{Attributes: identity.AttributesProto(attributesOf("bob"))}
	if _, err := s.Authorize(t.Context(), request); status.Code(err) != codes.Unavailable {
		t.Errorf("a decision from stale policies: %v", err)
	}
	if d, err := s.Authorize(t.Context(),
		&authzv1.AuthorizeRequest{Attributes: identity.AttributesProto(attributesOf("root",
			user.SystemPrivilegedGroup))}); err != nil || d.Decision != authzv1.Decision_DECISION_ALLOW {
		t.Errorf("system:masters: %v, %v", d, err)
	}
	if err := s.PolicyRevisions(nil, &failingStream{ctx: t.Context(), t: t}); status.Code(err) != codes.Unavailable {
		t.Errorf("policy revisions are sent: %v", err)
	}
}
