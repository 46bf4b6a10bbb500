package admission

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.opentelemetry.io/otel"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	namespacelifecycle "k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle"
	genericfeatures "k8s.io/apiserver/pkg/features"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/controlplane"
	controlplaneadmission "k8s.io/kubernetes/pkg/controlplane/apiserver/admission"
	kubeadmission "k8s.io/kubernetes/pkg/kubeapiserver/admission"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
	"k8s.io/kubernetes/plugin/pkg/admission/noderestriction"

	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/lifecycle"
	_ "watershed.dev/platform/patchlimit" // bounds the copies of webhooks' and policies' patches
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
)

// Service is a running admission chain. The state of its policies:
//
//	unread ── informers synced, and fresh ──────────► fresh
//	fresh ─── older than the freshness bound ───────► stale
//	stale ─── read again ───────────────────────────► fresh
//
// In the states unread and stale, only writes of the system's own services are reviewed.
type Service struct {
	admissionv1.UnimplementedAdmissionServer
	chain          admission.Interface
	cluster        *apiclient.Cluster
	informers      informers.SharedInformerFactory
	mapper         *mapper
	resolver       webhookutil.ServiceResolver
	crds           *crds
	hooks          *hooks
	stopped        stopSignal
	synced         atomic.Bool
	ready          lifecycle.Readiness
	policies       lifecycle.Readiness
	admissionRules *admissionRules
}

// New builds the chain. conn configures clients of the cluster.
func New(ctx context.Context, c *Config, conn *apiclient.Conn) (*Service, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	ownService, err := conn.OwnService()
	if err != nil {
		return nil, err
	}
	dyn, err := dynamic.NewForConfig(conn.Config)
	if err != nil {
		return nil, err
	}
	s := &Service{stopped: make(stopSignal)}
	s.policies.Set("policies", errors.New("not read yet"))
	if s.cluster, err = apiclient.NewCluster(conn, c.Freshness); err != nil {
		return nil, err
	}
	client := s.cluster.Client
	s.informers, s.mapper = s.cluster.Informers, newMapper(client.Discovery())
	s.trackAges()
	s.listClasses()
	if s.resolver, err = apiclient.NewServiceResolver(s.informers, c.AggregatorRouting); err != nil {
		return nil, err
	}
	if s.hooks, err = newHooks(c.Hooks, s.informers); err != nil {
		return nil, err
	}
	out, err := c.Egress.Open()
	if err != nil {
		return nil, err
	}
	initializers, err := s.initializers(ownService, out)
	if err != nil {
		return nil, err
	}
	// Upstream stores the chain in a server's configuration; the rest of that configuration is unused.
	gc := genericapiserver.NewConfig(legacyscheme.Codecs)
	gc.Authorization.Authorizer = remoteAuthorizer{client}
	version := compatibility.DefaultBuildEffectiveVersion()
	gc.EffectiveVersion = version
	manifests := utilfeature.DefaultFeatureGate.Enabled(genericfeatures.ManifestBasedAdmissionControlConfig)
	var hold *indexHold
	if !manifests { // no informer has the policies of files
		if hold, err = newIndexHold(s.informers, s.stopped); err != nil {
			return nil, err
		}
	}
	plugins, err := pluginClient(conn.Config, hold)
	if err != nil {
		return nil, err
	}
	initializers = append(initializers, paramInitializer{dyn, s.cluster}, s.mapper, s.stopped)
	if err := c.Options.ApplyTo(gc, newPluginInformers(s.informers, client, false), plugins, dyn,
		utilfeature.DefaultFeatureGate, version, initializers...); err != nil {
		if strings.HasPrefix(err.Error(), "failed to read plugin config") {
			err = fmt.Errorf("--admission-control-config-file %q: %w", c.Options.GenericAdmission.ConfigFile, err)
		}
		return nil, err
	}
	s.chain = admission.WithAudit(gc.AdmissionControl)
	if s.crds, err = newCRDs(s.cluster, conn.Config, ownService, s.resolver, out, s.mapper.invalidate); err != nil {
		return nil, err
	}
	// Some configurations need admission for every write. They are plugins that builtInRules does not cover, and
	// webhooks and policies from files, which no informer reports. A ResourceQuota configuration may also limit
	// resources without a quota. If NamespaceLifecycle is disabled, registry must not run it either.
	generic := c.Options.GenericAdmission
	matchAll := slices.ContainsFunc(generic.EnablePlugins, hasUnknownRules) ||
		len(c.Options.PluginNames) > 0 || generic.ConfigFile != "" ||
		slices.Contains(generic.DisablePlugins, namespacelifecycle.PluginName) ||
		manifests
	s.admissionRules = newAdmissionRules(s.informers, matchAll)
	return s, nil
}

// hasUnknownRules reports whether builtInRules does not cover a plugin.
func hasUnknownRules(plugin string) bool {
	return plugin != noderestriction.PluginName && kubeoptions.DefaultOffAdmissionPlugins().Has(plugin)
}

// trackAges registers the resources that decide a review, so that their age counts. They are webhooks, policies, and
// the resources by which the default plugins restrict a namespace. The age of classes, CRDs and parameters does not
// count, but a stalled event log does not delay them (apiclient.ListWatch). Without fresh pods and nodes, plugins
// reject a write of a node, only warn, or copy older labels of a node to a pod.
func (s *Service) trackAges() {
	const group = "/apis/admissionregistration.k8s.io/v1/"
	core, rules := s.informers.Core().V1(), s.informers.Admissionregistration().V1()
	for path, i := range map[string]cache.SharedIndexInformer{
		"/api/v1/namespaces":                        core.Namespaces().Informer(),
		"/api/v1/resourcequotas":                    core.ResourceQuotas().Informer(),
		"/api/v1/limitranges":                       core.LimitRanges().Informer(),
		"/api/v1/serviceaccounts":                   core.ServiceAccounts().Informer(),
		group + "mutatingwebhookconfigurations":     rules.MutatingWebhookConfigurations().Informer(),
		group + "validatingwebhookconfigurations":   rules.ValidatingWebhookConfigurations().Informer(),
		group + "validatingadmissionpolicies":       rules.ValidatingAdmissionPolicies().Informer(),
		group + "validatingadmissionpolicybindings": rules.ValidatingAdmissionPolicyBindings().Informer(),
		group + "mutatingadmissionpolicies":         rules.MutatingAdmissionPolicies().Informer(),
		group + "mutatingadmissionpolicybindings":   rules.MutatingAdmissionPolicyBindings().Informer(),
	} {
		s.cluster.TrackAge(path, "", i)
	}
}

// listClasses registers informers of the classes by which plugins default and reject objects. A stalled event log does
// not delay them.
func (s *Service) listClasses() {
	c := s.cluster
	for _, l := range []*apiclient.ListWatch{
		apiclient.NewListWatch(c.Client.StorageV1().StorageClasses(), &storagev1.StorageClass{}, c),
		apiclient.NewListWatch(c.Client.NetworkingV1().IngressClasses(), &networkingv1.IngressClass{}, c),
		apiclient.NewListWatch(c.Client.SchedulingV1().PriorityClasses(), &schedulingv1.PriorityClass{}, c),
		apiclient.NewListWatch(c.Client.NodeV1().RuntimeClasses(), &nodev1.RuntimeClass{}, c),
	} {
		newInformer := func(_ kubernetes.Interface, resync time.Duration) cache.SharedIndexInformer {
			return cache.NewSharedIndexInformer(l.Informer(), l.Example, resync, cache.Indexers{})
		}
		s.informers.InformerFor(l.Example, newInformer)
	}
}

func (s *Service) initializers(ownService *rest.Config, out egress.Selector) ([]admission.PluginInitializer, error) {
	config := controlplaneadmission.Config{
		LoopbackClientConfig: ownService,
		ExternalInformers:    newPluginInformers(s.informers, s.cluster.Client, true),
		APIResourceConfig:    controlplane.DefaultAPIResourceConfigSource(),
	}
	initializers, err := config.New(&http.Transport{}, out.Upstream(), s.resolver, otel.GetTracerProvider())
	if err != nil {
		return nil, err
	}
	if s.hooks != nil {
		initializers = append(initializers, s.hooks.initializer())
	}
	return append(initializers, kubeadmission.NewPluginInitializer()), nil
}

// Register registers the service with g.
func (s *Service) Register(g grpc.ServiceRegistrar) { admissionv1.RegisterAdmissionServer(g, s) }

// Collectors returns the service's own metrics; upstream's register themselves.
func (s *Service) Collectors() []prometheus.Collector { return hookMetrics() }

// Ready returns a readiness without conditions, because a plugin that has not read its data rejects by itself.
func (s *Service) Ready() *lifecycle.Readiness { return &s.ready }

// Policies is ready once the policies have been read. Each review checks their age.
func (s *Service) Policies() *lifecycle.Readiness { return &s.policies }

// checkFresh returns the reason that the chain cannot review, or nil.
func (s *Service) checkFresh() error {
	if !s.synced.Load() {
		return errors.New("plugins have not read the cluster yet")
	}
	return s.cluster.Err()
}

// Run keeps the plugins' informers fresh until ctx is done.
func (s *Service) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	wg.Go(func() { s.admissionRules.run(ctx) })
	wg.Go(func() { s.mapper.run(ctx) })
	wg.Go(func() {
		select {
		case <-s.cluster.Synced():
		case <-ctx.Done():
			return
		}
		s.crds.informers.WaitForCacheSync(ctx.Done())
		s.synced.Store(ctx.Err() == nil)
		select {
		case <-s.cluster.Fresh():
			s.policies.Set("policies", nil)
		case <-ctx.Done():
		}
	})
	wg.Go(func() {
		<-ctx.Done()
		close(s.stopped)
	})
	err := s.cluster.Run(ctx, s.crds.informers.Start)
	s.crds.informers.Shutdown()
	wg.Wait()
	return err
}

// rulesPeriod is how often a stream sends the rules, although they are unchanged. It is well below
// admissionrules.Lease.
const rulesPeriod = time.Second

// AdmissionRules implements admissionv1.AdmissionServer. The stream ends when the policies are stale. Every write then
// requests admission, which rejects it.
func (s *Service) AdmissionRules(_ *admissionv1.AdmissionRulesRequest,
	stream grpc.ServerStreamingServer[admissionv1.AdmissionRuleSet]) error {
	unchanged := time.NewTicker(rulesPeriod)
	defer unchanged.Stop()
	for {
		set, changed := s.admissionRules.current.Get()
		if err := s.checkFresh(); err != nil {
			return status.Error(codes.Unavailable, err.Error())
		}
		if err := stream.Send(set); err != nil {
			return err
		}
		select {
		case <-changed:
		case <-unchanged.C:
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
