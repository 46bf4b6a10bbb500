package authz

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	kubefeatures "k8s.io/kubernetes/pkg/features"
	"k8s.io/kubernetes/pkg/kubeapiserver/authorizer/modes"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/reload"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

// Service is a running authz. The state of its policies:
//
//	unread ── informers synced, and fresh ──────────► fresh
//	fresh ─── older than the freshness bound ───────► stale
//	stale ─── read again ───────────────────────────► fresh
//
// In the states unread and stale, only system:masters, the system's services, and anonymous requests under AlwaysAllow
// are decided.
type Service struct {
	authzv1.UnimplementedAuthzServer
	chain           *chain
	files           reload.Files
	privileged      authorizer.Authorizer
	cluster         *apiclient.Cluster
	policyRevisions *policyRevisions
	// rejectsAnonymous means that clients must have credentials, because --authorization-mode allows every request. As
	// in kube-apiserver, AlwaysAllow in --authorization-config does not set it
	// (k8s.io/kubernetes/pkg/kubeapiserver/options, ApplyAuthorization).
	rejectsAnonymous bool
	synced           atomic.Bool
	ready            lifecycle.Readiness
	policies         lifecycle.Readiness
}

// New builds the authorizers. cluster configures the client that reads the policies.
func New(ctx context.Context, c *Config, cluster *apiclient.Conn) (*Service, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	var err error
	s := &Service{
		policyRevisions:  newPolicyRevisions(),
		privileged:       authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup),
		rejectsAnonymous: slices.Contains(c.Options.Modes, modes.ModeAlwaysAllow),
	}
	s.policies.Set("policies", errors.New("not read yet"))
	if s.cluster, err = apiclient.NewCluster(cluster, c.Freshness); err != nil {
		return nil, err
	}
	ac, err := c.Options.ToAuthorizationConfig(s.cluster.Informers)
	if err != nil {
		return nil, err
	}
	out, err := c.Egress.Open()
	if err != nil {
		return nil, err
	}
	ac.CustomDial = out.ControlPlane()
	if s.chain, err = newChain(ctx, ac, &s.files, func() { s.policyRevisions.record("", true) }); err != nil {
		return nil, fmt.Errorf("--authorization-mode: %w", err)
	}
	for path, i := range s.rbacInformers() {
		s.cluster.TrackAge(path, "", i)
		if _, err := i.AddEventHandler(s.policyRevisions.eventHandler()); err != nil {
			return nil, err
		}
	}
	for path, i := range s.nodeInformers() {
		s.cluster.TrackAge(path, "", i)
	}
	return s, nil
}

// rbacInformers returns the informers that RBAC reads, by path. There are none if the chain has no RBAC.
func (s *Service) rbacInformers() map[string]cache.SharedIndexInformer {
	if !s.chain.has("RBAC") {
		return nil
	}
	const group = "/apis/rbac.authorization.k8s.io/v1/"
	rbac := s.cluster.Informers.Rbac().V1()
	return map[string]cache.SharedIndexInformer{
		group + "roles":               rbac.Roles().Informer(),
		group + "rolebindings":        rbac.RoleBindings().Informer(),
		group + "clusterroles":        rbac.ClusterRoles().Informer(),
		group + "clusterrolebindings": rbac.ClusterRoleBindings().Informer(),
	}
}

// nodeInformers returns the informers that decide a node's permissions, by path, as
// k8s.io/kubernetes/pkg/kubeapiserver/authorizer passes them to the node authorizer. There are none if the chain has no
// Node.
func (s *Service) nodeInformers() map[string]cache.SharedIndexInformer {
	if !s.chain.has("Node") {
		return nil
	}
	all := s.cluster.Informers
	tracked := map[string]cache.SharedIndexInformer{
		"/api/v1/pods":                              all.Core().V1().Pods().Informer(),
		"/api/v1/persistentvolumes":                 all.Core().V1().PersistentVolumes().Informer(),
		"/apis/storage.k8s.io/v1/volumeattachments": all.Storage().V1().VolumeAttachments().Informer(),
	}
	if utilfeature.DefaultFeatureGate.Enabled(kubefeatures.DynamicResourceAllocation) {
		tracked["/apis/resource.k8s.io/v1/resourceslices"] = all.Resource().V1().ResourceSlices().Informer()
	}
	if utilfeature.DefaultFeatureGate.Enabled(kubefeatures.PodCertificateRequest) {
		tracked["/apis/certificates.k8s.io/v1beta1/podcertificaterequests"] =
			all.Certificates().V1beta1().PodCertificateRequests().Informer()
	}
	return tracked
}

// checkFresh returns the reason that the policies cannot be used, or nil.
func (s *Service) checkFresh() error {
	if !s.synced.Load() {
		return errors.New("the policies have not been read yet")
	}
	return s.cluster.Err()
}

// Register registers the service with g.
func (s *Service) Register(g grpc.ServiceRegistrar) { authzv1.RegisterAuthzServer(g, s) }

// Collectors returns the service's own metrics: none.
func (s *Service) Collectors() []prometheus.Collector { return nil }

// Files serves the status of the files that are reloaded at run time.
func (s *Service) Files() http.Handler { return &s.files }

// Ready returns a readiness without conditions. The privileged group needs no policies, and all other users get 503
// until the policies are read. Policies reports when that is.
func (s *Service) Ready() *lifecycle.Readiness { return &s.ready }

// Policies is ready once the policies have been read. Each decision checks their age.
func (s *Service) Policies() *lifecycle.Readiness { return &s.policies }

// Run keeps the policies fresh until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	go s.files.Run(ctx)
	go func() {
		select {
		case <-s.cluster.Synced():
			s.synced.Store(true)
		case <-ctx.Done():
			return
		}
		select {
		case <-s.cluster.Fresh():
			s.policies.Set("policies", nil)
		case <-ctx.Done():
		}
	}()
	return s.cluster.Run(ctx)
}

// Authorize implements authzv1.AuthzServer.
func (s *Service) Authorize(ctx context.Context, r *authzv1.AuthorizeRequest) (*authzv1.AuthorizeResponse, error) {
	policyRevision := s.policyRevisions.current() // before the decision, so that a concurrent change invalidates it
	attrs := identity.Attributes(r.Attributes)
	out := &authzv1.AuthorizeResponse{Replica: s.policyRevisions.replica, PolicyRevision: policyRevision}
	if d, reason, _ := s.privileged.Authorize(ctx, attrs); d == authorizer.DecisionAllow {
		out.Decision, out.Reason = authzv1.Decision_DECISION_ALLOW, reason
		out.WildcardName, out.WildcardNamespace = attrs.ResourceRequest, attrs.ResourceRequest
		return policyIndependent(out), nil
	}
	if allowed, isService := serviceAllowed(attrs); allowed {
		out.Decision, out.Reason = authzv1.Decision_DECISION_ALLOW, "a service of the system"
		// the service rules do not restrict names or namespaces
		out.WildcardName, out.WildcardNamespace = attrs.ResourceRequest, attrs.ResourceRequest
		return policyIndependent(out), nil
	} else if isService && !isGrantable(attrs) {
		out.Reason = "not among the rights of this service of the system"
		return policyIndependent(out), nil
	}
	if attrs.User.GetName() == user.Anonymous && !r.ClientAuthenticated && s.rejectsAnonymous {
		// Gateways respond with 401 before they call authz, once they have received a policy revision.
		out.Reason = "anonymous requests are not allowed where everything is"
		return policyIndependent(out), nil
	}
	if err := s.checkFresh(); err != nil { // undecided: UNAVAILABLE, which is not cached as a denial
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	d, reason, cacheable, err := s.chain.decide(ctx, attrs)
	out.Decision, out.Reason = identity.DecisionProto(d), reason
	if err != nil {
		out.EvaluationError = err.Error()
	}
	if !cacheable || isNode(attrs.User) {
		out.Transient = true
	} else if d == authorizer.DecisionAllow {
		out.WildcardName, out.WildcardNamespace, out.WildcardReason = s.chain.wildcard(ctx, attrs)
	}
	return out, nil
}

// policyIndependentTTL is how long a decision may be cached that depends on no policy.
const policyIndependentTTL = time.Minute

func policyIndependent(d *authzv1.AuthorizeResponse) *authzv1.AuthorizeResponse {
	d.PolicyRevision, d.CacheMilliseconds = 0, policyIndependentTTL.Milliseconds()
	return d
}

// isNode reports whether a user is a node. A node's permissions depend on the pods bound to it, which policy revisions
// do not cover.
func isNode(u user.Info) bool {
	for _, g := range u.GetGroups() {
		if g == user.NodesGroup {
			return true
		}
	}
	return false
}

// Rules implements authzv1.AuthzServer.
func (s *Service) Rules(ctx context.Context, r *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	if err := s.checkFresh(); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	resources, others, incomplete, err := s.chain.RulesFor(ctx, identity.User(r.User), r.Namespace)
	out := &authzv1.RulesResponse{Incomplete: incomplete}
	if err != nil {
		out.EvaluationError = err.Error()
	}
	for _, x := range resources {
		out.ResourceRules = append(out.ResourceRules, &authzv1.ResourceRule{
			Verbs:         x.GetVerbs(),
			ApiGroups:     x.GetAPIGroups(),
			Resources:     x.GetResources(),
			ResourceNames: x.GetResourceNames(),
		})
	}
	for _, x := range others {
		out.NonResourceRules = append(out.NonResourceRules, &authzv1.NonResourceRule{
			Verbs:           x.GetVerbs(),
			NonResourceUrls: x.GetNonResourceURLs(),
		})
	}
	return out, nil
}
