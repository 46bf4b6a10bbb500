// Package admission answers whether an object may be so, and changes it on the way. The plugins are kube-apiserver's
// own, with its defaults and in its order; they read the cluster as clients of the gateway.
package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	authorizationv1 "k8s.io/api/authorization/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/util/proxy"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	aggregatorapiserver "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/controlplane"
	controlplaneadmission "k8s.io/kubernetes/pkg/controlplane/apiserver/admission"
	kubeadmission "k8s.io/kubernetes/pkg/kubeapiserver/admission"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/features"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
)

// Config is what admission is told: kube-apiserver's admission flags, and how to reach the gateway.
type Config struct {
	Options           *kubeoptions.AdmissionOptions
	Kubeconfig        string
	AggregatorRouting bool
}

// NewConfig returns the defaults.
func NewConfig() *Config { return &Config{Options: kubeoptions.NewAdmissionOptions()} }

// AddFlags adds every setting to fs.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	features.AddFlag(fs, false)
	c.Options.AddFlags(fs)
	fs.BoolVar(&c.AggregatorRouting, "enable-aggregator-routing", false, "Turns on routing of webhook calls to endpoints' addresses rather than to cluster IPs.")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "", "How to reach the gateway, for what plugins must know of the cluster.")
}

// Service is a running admission chain.
type Service struct {
	admissionv1.UnimplementedAdmissionServer
	chain     admission.Interface
	informers informers.SharedInformerFactory
	resolver  webhookutil.ServiceResolver
	customs   *customs
	synced    atomic.Bool
	interests *interests
}

// New builds the chain.
func New(ctx context.Context, c *Config) (*Service, error) {
	if errs := c.Options.Validate(); len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	plain, err := apiclient.Config(c.Kubeconfig, "admission")
	if err != nil {
		return nil, err
	}
	rc := apiclient.Protobuf(plain)
	client, err := kubernetes.NewForConfig(rc)
	if err != nil {
		return nil, err
	}
	dyn, err := dynamic.NewForConfig(plain)
	if err != nil {
		return nil, err
	}
	s := &Service{informers: apiclient.Informers(client)}
	if s.resolver, err = s.serviceResolver(c.AggregatorRouting); err != nil {
		return nil, err
	}
	initializers, err := s.initializers(rc)
	if err != nil {
		return nil, err
	}
	// Upstream fills a server's configuration with the chain; nothing else of it is used.
	gc := genericapiserver.NewConfig(legacyscheme.Codecs)
	gc.Authorization.Authorizer = remoteAuthorizer{client}
	version := compatibility.DefaultBuildEffectiveVersion()
	gc.EffectiveVersion = version
	if err := c.Options.ApplyTo(gc, s.informers, client, dyn, utilfeature.DefaultFeatureGate, version, initializers...); err != nil {
		return nil, err
	}
	s.chain = gc.AdmissionControl
	if s.customs, err = newCustoms(plain, s.resolver); err != nil {
		return nil, err
	}
	s.interests = newInterests(s.informers, len(c.Options.GenericAdmission.EnablePlugins) > 0 || len(c.Options.PluginNames) > 0)
	return s, nil
}

// serviceResolver finds the addresses of webhooks.
func (s *Service) serviceResolver(endpoints bool) (webhookutil.ServiceResolver, error) {
	services := s.informers.Core().V1().Services().Lister()
	if !endpoints {
		return aggregatorapiserver.NewClusterIPServiceResolver(services), nil
	}
	slices, err := proxy.NewEndpointSliceIndexerGetter(s.informers.Discovery().V1().EndpointSlices())
	return aggregatorapiserver.NewEndpointServiceResolver(services, slices), err
}

func (s *Service) initializers(rc *rest.Config) ([]admission.PluginInitializer, error) {
	config := controlplaneadmission.Config{LoopbackClientConfig: rc, ExternalInformers: s.informers, APIResourceConfig: controlplane.DefaultAPIResourceConfigSource()}
	initializers, err := config.New(&http.Transport{}, nil, s.resolver, noop.NewTracerProvider())
	if err != nil {
		return nil, err
	}
	return append(initializers, kubeadmission.NewPluginInitializer()), nil
}

// remoteAuthorizer asks the gateway, as any client may: services do not call each other.
type remoteAuthorizer struct{ client kubernetes.Interface }

// Authorize implements authorizer.Authorizer.
func (r remoteAuthorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: a.GetUser().GetName(), UID: a.GetUser().GetUID(), Groups: a.GetUser().GetGroups()}}
	for k, v := range a.GetUser().GetExtra() {
		if review.Spec.Extra == nil {
			review.Spec.Extra = map[string]authorizationv1.ExtraValue{}
		}
		review.Spec.Extra[k] = v
	}
	if a.IsResourceRequest() {
		review.Spec.ResourceAttributes = &authorizationv1.ResourceAttributes{Namespace: a.GetNamespace(), Verb: a.GetVerb(), Group: a.GetAPIGroup(),
			Version: a.GetAPIVersion(), Resource: a.GetResource(), Subresource: a.GetSubresource(), Name: a.GetName()}
	} else {
		review.Spec.NonResourceAttributes = &authorizationv1.NonResourceAttributes{Path: a.GetPath(), Verb: a.GetVerb()}
	}
	got, err := r.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, review, metav1.CreateOptions{})
	switch {
	case err != nil:
		return authorizer.DecisionDeny, "", err
	case got.Status.Allowed:
		return authorizer.DecisionAllow, got.Status.Reason, nil
	case got.Status.Denied:
		return authorizer.DecisionDeny, got.Status.Reason, nil
	}
	return authorizer.DecisionNoOpinion, got.Status.Reason, nil
}

// Register offers the service on g.
func (s *Service) Register(g grpc.ServiceRegistrar) { admissionv1.RegisterAdmissionServer(g, s) }

// Collectors are the service's own metrics; upstream's register themselves.
func (s *Service) Collectors() []prometheus.Collector { return nil }

// Ready is nil from the beginning: a plugin that has not read what it needs refuses by itself.
func (s *Service) Ready(context.Context) error { return nil }

// Synced says why the chain cannot be asked yet, or nil.
func (s *Service) Synced(context.Context) error {
	if !s.synced.Load() {
		return errors.New("plugins have not read the cluster yet")
	}
	return nil
}

// Run keeps the plugins' view of the cluster fresh until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	s.informers.Start(ctx.Done())
	s.customs.informers.Start(ctx.Done())
	var wg sync.WaitGroup
	wg.Go(func() { s.interests.run(ctx) })
	s.informers.WaitForCacheSync(ctx.Done())
	s.customs.informers.WaitForCacheSync(ctx.Done())
	s.synced.Store(ctx.Err() == nil)
	<-ctx.Done()
	s.informers.Shutdown()
	s.customs.informers.Shutdown()
	wg.Wait()
	return nil
}

// Interests implements admissionv1.AdmissionServer.
func (s *Service) Interests(_ *admissionv1.InterestsRequest, stream grpc.ServerStreamingServer[admissionv1.InterestSet]) error {
	for {
		set, changed := s.interests.get()
		if err := stream.Send(set); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return stream.Context().Err()
		}
	}
}

func optionsOf(op admissionv1.Operation, data []byte) (runtime.Object, error) {
	if len(data) == 0 {
		return nil, nil
	}
	var o runtime.Object
	switch op {
	case admissionv1.Operation_OPERATION_CREATE:
		o = &metav1.CreateOptions{}
	case admissionv1.Operation_OPERATION_UPDATE:
		o = &metav1.UpdateOptions{}
	case admissionv1.Operation_OPERATION_DELETE:
		o = &metav1.DeleteOptions{}
	default:
		return nil, nil
	}
	if err := json.Unmarshal(data, o); err != nil {
		return nil, apierrors.NewInternalError(fmt.Errorf("options: %w", err))
	}
	return o, nil
}
