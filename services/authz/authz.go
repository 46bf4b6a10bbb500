// Package authz answers whether a user may do a thing. The authorizers are kube-apiserver's own, built from its own
// options; the policies they read come through ordinary informers from the gateway.
package authz

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/features"
	"watershed.dev/platform/identity"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
)

// Config is what authz is told: kube-apiserver's authorization flags, and how to reach the gateway.
type Config struct {
	Options    *kubeoptions.BuiltInAuthorizationOptions
	Kubeconfig string
}

// NewConfig returns the defaults: Node and RBAC.
func NewConfig() *Config {
	o := kubeoptions.NewBuiltInAuthorizationOptions()
	o.Modes = []string{"Node", "RBAC"}
	return &Config{Options: o}
}

// AddFlags adds every setting to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs, true)
	c.Options.AddFlags(fs)
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "How to reach the gateway, for the policies.")
}

// Service is a running authz.
type Service struct {
	authzv1.UnimplementedAuthzServer
	authorizer authorizer.Authorizer
	privileged authorizer.Authorizer
	rules      authorizer.RuleResolver
	informers  informers.SharedInformerFactory
	synced     atomic.Bool

	// generation counts the changes of policy that this replica has seen.
	replica    string
	mu         sync.Mutex
	generation uint64
	moved      chan struct{}
}

// New builds the authorizers.
func New(ctx context.Context, c *Config) (*Service, error) {
	if errs := append(c.Options.Complete(), c.Options.Validate()...); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	rc, err := apiclient.Config(c.Kubeconfig, "authz")
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(apiclient.Protobuf(rc))
	if err != nil {
		return nil, err
	}
	s := &Service{informers: apiclient.Informers(client, references), moved: make(chan struct{}), generation: 1, replica: rand.Text(),
		privileged: authorizerfactory.NewPrivilegedGroups(user.SystemPrivilegedGroup)}
	ac, err := c.Options.ToAuthorizationConfig(s.informers)
	if err != nil {
		return nil, err
	}
	if s.authorizer, s.rules, err = ac.New(ctx, "watershed"); err != nil {
		return nil, fmt.Errorf("--authorization-mode: %w", err)
	}
	rbac := s.informers.Rbac().V1()
	for _, i := range []cache.SharedIndexInformer{rbac.Roles().Informer(), rbac.RoleBindings().Informer(), rbac.ClusterRoles().Informer(), rbac.ClusterRoleBindings().Informer()} {
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: s.changed, DeleteFunc: s.changed, UpdateFunc: func(old, newer any) {
				if revisionOf(old) != revisionOf(newer) { // a resync changes nothing
					s.changed(newer)
				}
			}}); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func revisionOf(obj any) string {
	m, err := meta.Accessor(obj)
	if err != nil {
		return ""
	}
	return m.GetResourceVersion()
}

func (s *Service) changed(any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.generation++
	close(s.moved)
	s.moved = make(chan struct{})
}

func (s *Service) current() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.generation
}

// references leaves of a pod what the node authorizer reads: where it runs and what it refers to. Of its containers that is
// where their environment comes from (k8s.io/kubernetes/pkg/api/v1/pod, VisitPodSecretNames and VisitPodConfigmapNames).
func references(obj any) {
	pod, ok := obj.(*corev1.Pod)
	if !ok {
		return
	}
	of := func(env []corev1.EnvVar) (from []corev1.EnvVar) {
		for _, e := range env {
			if e.ValueFrom != nil {
				from = append(from, e)
			}
		}
		return from
	}
	strip := func(all []corev1.Container) {
		for i, c := range all {
			all[i] = corev1.Container{Name: c.Name, Env: of(c.Env), EnvFrom: c.EnvFrom}
		}
	}
	strip(pod.Spec.InitContainers)
	strip(pod.Spec.Containers)
	for i, c := range pod.Spec.EphemeralContainers {
		pod.Spec.EphemeralContainers[i] = corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: c.Name, Env: of(c.Env), EnvFrom: c.EnvFrom}}
	}
	pod.Spec.Affinity, pod.Spec.Tolerations = nil, nil
	pod.Status = corev1.PodStatus{ResourceClaimStatuses: pod.Status.ResourceClaimStatuses, ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus}
	mirror, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]
	if pod.Annotations = nil; ok {
		pod.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: mirror}
	}
}

// Register offers the service on g.
func (s *Service) Register(g grpc.ServiceRegistrar) { authzv1.RegisterAuthzServer(g, s) }

// Collectors are the service's own metrics.
func (s *Service) Collectors() []prometheus.Collector { return nil }

// Ready is nil from the beginning: the privileged group needs no policy, and until the policies are there everyone
// else is refused. Synced says when they are.
func (s *Service) Ready(context.Context) error { return nil }

// Synced says why policies cannot be trusted yet, or nil.
func (s *Service) Synced(context.Context) error {
	if !s.synced.Load() {
		return errors.New("policies are not read yet")
	}
	return nil
}

// Run follows the policies until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	s.informers.Start(ctx.Done())
	s.informers.WaitForCacheSync(ctx.Done())
	s.synced.Store(ctx.Err() == nil)
	<-ctx.Done()
	s.informers.Shutdown()
	return nil
}

// Authorize implements authzv1.AuthzServer.
func (s *Service) Authorize(ctx context.Context, r *authzv1.AuthorizeRequest) (*authzv1.AuthorizeResponse, error) {
	generation := s.current() // before deciding: a change meanwhile voids the decision
	attrs := identity.Attributes(r.Attributes)
	if d, reason, _ := s.privileged.Authorize(ctx, attrs); d == authorizer.DecisionAllow {
		return &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW, Reason: reason, Generation: generation, Replica: s.replica}, nil
	}
	synced := s.synced.Load()
	d, reason, err := s.authorizer.Authorize(ctx, attrs)
	if !synced && d != authorizer.DecisionAllow { // nobody knows yet: it is refused, but not for good
		return nil, status.Error(codes.Unavailable, "policies are not read yet")
	}
	out := &authzv1.AuthorizeResponse{Decision: identity.DecisionProto(d), Reason: reason, Replica: s.replica}
	if err != nil {
		out.EvaluationError = err.Error()
	}
	if synced && !isNode(attrs.User) {
		out.Generation = generation
	}
	return out, nil
}

// isNode recognizes nodes: what they may do follows the pods bound to them, which no policy generation tells of.
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
	resources, others, incomplete, err := s.rules.RulesFor(ctx, identity.User(r.User), r.Namespace)
	out := &authzv1.RulesResponse{Incomplete: incomplete}
	if err != nil {
		out.EvaluationError = err.Error()
	}
	for _, x := range resources {
		out.ResourceRules = append(out.ResourceRules, &authzv1.ResourceRule{Verbs: x.GetVerbs(), ApiGroups: x.GetAPIGroups(), Resources: x.GetResources(), ResourceNames: x.GetResourceNames()})
	}
	for _, x := range others {
		out.NonResourceRules = append(out.NonResourceRules, &authzv1.NonResourceRule{Verbs: x.GetVerbs(), NonResourceUrls: x.GetNonResourceURLs()})
	}
	return out, nil
}

// Generations implements authzv1.AuthzServer.
func (s *Service) Generations(_ *authzv1.GenerationsRequest, stream grpc.ServerStreamingServer[authzv1.Generation]) error {
	for {
		s.mu.Lock()
		g, moved := s.generation, s.moved
		s.mu.Unlock()
		if err := stream.Send(&authzv1.Generation{Generation: g, Replica: s.replica}); err != nil {
			return err
		}
		select {
		case <-moved:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}
