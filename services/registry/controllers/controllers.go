// Package controllers runs the controllers that are part of kube-apiserver. The controllers are upstream's. They
// maintain:
//
//   - the system namespaces, bootstrap RBAC, priority classes and flow-control defaults.
//   - the kubernetes Service, its endpoints and the addresses of Services.
//   - the conditions of CRDs and the APIServices.
//   - the published authentication configuration.
//   - the leaders among LeaseCandidates, with the feature gate CoordinatedLeaderElection.
//
// A single registry runs them at a time, elected through etcd. If a full etcd grants no lease, every registry runs
// them, as every kube-apiserver does. Each controller has its own goroutines, which end with the context of Run. Every
// registry keeps its gateways' addresses among the endpoints of the kubernetes Service, and renews its identity lease.
//
// # Review notes
//
//   - Run must start the ServiceCIDR controller first, and kubernetesService after hookServiceRepair and
//     awaitAllocators. Otherwise the kubernetes Service appears 10 s later.
//   - registration must wait for the CRDs. Otherwise it deletes the APIServices of existing CRDs.
//   - The value of ElectionKey must not change. Replicas of two releases share it during a rolling upgrade.
package controllers

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	aggregator "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/pkg/controlplane/apiserver/options"
	"k8s.io/kubernetes/pkg/controlplane/controller/clusterauthenticationtrust"
	"k8s.io/kubernetes/pkg/controlplane/controller/defaultservicecidr"
	"k8s.io/kubernetes/pkg/controlplane/controller/kubernetesservice"
	"k8s.io/kubernetes/pkg/controlplane/controller/leaderelection"
	"k8s.io/kubernetes/pkg/controlplane/controller/legacytokentracking"
	"k8s.io/kubernetes/pkg/controlplane/controller/systemnamespaces"
	"k8s.io/kubernetes/pkg/controlplane/reconcilers"

	"watershed.dev/platform/lifecycle"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/storage"
)

// ElectionKey is the name of the own key by which registries elect the registry that runs the controllers.
const ElectionKey = "controllers"

// identityName is the label value of kube-apiserver's identity leases.
const identityName = "kube-apiserver"

// notManaged is the --advertise-address of a registry that does not manage the kubernetes Service.
const notManaged = "none"

// Options are kube-apiserver's flags that the controllers need.
type Options struct {
	AdvertiseAddress         string
	SecurePort               int
	ClientCAFile             string
	RequestHeaderCAFile      string
	RequestHeaderNames       []string
	RequestHeaderUserHeaders []string
	RequestHeaderUIDHeaders  []string
	RequestHeaderGroups      []string
	RequestHeaderExtras      []string
	AggregatorRouting        bool
	ProxyClientCertFile      string
	ProxyClientKeyFile       string
	// ServiceNodePort is the node port of the kubernetes Service. 0: the Service has none.
	ServiceNodePort int
	// EndpointReconciler is the type of the reconciler of the kubernetes Service's endpoints.
	EndpointReconciler string
	// APIServerCount is the maximum of endpoints that the reconciler master-count keeps.
	APIServerCount int
	// Election has the durations of kube-apiserver's Lease of coordinated leader election.
	Election leaderelection.LeaderElectionTimers
}

// AddFlags registers the controllers' flags with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.AdvertiseAddress, "advertise-address", "",
		"The IP address of the kubernetes Service's endpoint, such as the gateways' load balancer. Empty: each "+
			"gateway's own address. none: this registry does not manage the Service.")
	fs.IntVar(&o.SecurePort, "secure-port", 6443,
		"The port on which the gateway serves HTTPS. The kubernetes Service points to it.")
	fs.StringVar(&o.ClientCAFile, "client-ca-file", "",
		"The clients' certificate authority, published in extension-apiserver-authentication.")
	fs.StringVar(&o.RequestHeaderCAFile, "requestheader-client-ca-file", "",
		"The front proxies' certificate authority, published in extension-apiserver-authentication.")
	fs.BoolVar(&o.AggregatorRouting, "enable-aggregator-routing", false,
		"Turns on routing of requests for aggregated API servers and webhooks to endpoints' addresses rather than "+
			"to cluster IPs.")
	fs.StringVar(&o.ProxyClientCertFile, "proxy-client-cert-file", "",
		"Client certificate for the availability checks of aggregated API servers.")
	fs.StringVar(&o.ProxyClientKeyFile, "proxy-client-key-file", "",
		"Private key for the client certificate of --proxy-client-cert-file.")
	fs.IntVar(&o.ServiceNodePort, "kubernetes-service-node-port", 0,
		"If non-zero, the kubernetes Service is of type NodePort, with this port. Otherwise it is of type ClusterIP.")
	fs.StringVar(&o.EndpointReconciler, "endpoint-reconciler-type", string(reconcilers.LeaseEndpointReconcilerType),
		"The reconciler of the kubernetes Service's endpoints: lease, none, or master-count, which is deprecated.")
	fs.IntVar(&o.APIServerCount, "apiserver-count", 1,
		"The number of API servers in the cluster, with --endpoint-reconciler-type=master-count.")
	_ = fs.MarkDeprecated("apiserver-count", "apiserver-count is deprecated and will be removed in a future version.")
	fs.StringSliceVar(&o.RequestHeaderNames, "requestheader-allowed-names", nil,
		"Client certificate common names of allowed front proxies.")
	fs.StringSliceVar(&o.RequestHeaderUserHeaders, "requestheader-username-headers", nil,
		"Request headers to inspect for usernames.")
	fs.StringSliceVar(&o.RequestHeaderUIDHeaders, "requestheader-uid-headers", nil,
		"Request headers to inspect for UIDs.")
	fs.StringSliceVar(&o.RequestHeaderGroups, "requestheader-group-headers", nil,
		"Request headers to inspect for groups.")
	fs.StringSliceVar(&o.RequestHeaderExtras, "requestheader-extra-headers-prefix", nil,
		"Request header prefixes to inspect.")
	addElectionFlags(fs, &o.Election)
}

// Validate returns an error that names the invalid flag.
func (o *Options) Validate() error {
	switch reconcilers.Type(o.EndpointReconciler) {
	case reconcilers.LeaseEndpointReconcilerType, reconcilers.NoneEndpointReconcilerType,
		reconcilers.MasterCountReconcilerType:
	default:
		return fmt.Errorf("--endpoint-reconciler-type %q: want lease, none or master-count", o.EndpointReconciler)
	}
	if o.APIServerCount <= 0 {
		return fmt.Errorf("--apiserver-count %d: want a positive number", o.APIServerCount)
	}
	if e := o.Election; e.LeaseDuration <= e.RenewDeadline || e.RenewDeadline <= e.RetryPeriod {
		return fmt.Errorf("--coordinated-leadership-lease-duration %v: must exceed --coordinated-leadership-renew-deadline "+
			"%v, which must exceed --coordinated-leadership-retry-period %v", e.LeaseDuration, e.RenewDeadline, e.RetryPeriod)
	}
	return nil
}

// Controllers runs upstream's controllers on the elected registry.
type Controllers struct {
	Options
	Client    *kubernetes.Clientset
	Loopback  *restclient.Config
	Informers informers.SharedInformerFactory
	Hooks     []installer.PostStartHook
	Groups    []*registryv1.Group
	Storage   *storage.Storage
	APIs      *installer.Options
	Identity  string
	// Extensions has the informer of CRDs. CRClients deletes the objects of a CRD.
	Extensions extensions.SharedInformerFactory
	CRClients  finalizer.CRClientGetter
	// ServedByAll returns the CRDs that every live gateway serves and that are not established, by name, with the
	// lowest of the gateways' revisions.
	ServedByAll func(context.Context) (map[string]int64, error)
	// Services resolves the addresses of aggregated servers.
	Services aggregator.ServiceResolver
	// Dialer dials aggregated servers. nil means a direct connection.
	Dialer *transport.DialHolder
	// StartHooks is the progress of Run.
	StartHooks *StartHooks

	// endpoints are the endpoints of the kubernetes Service; nil: they are not managed.
	endpoints *Endpoints
}

// Prepare registers the informers that the controllers read. It must run before the informers start. It returns the
// endpoints of the kubernetes Service, or nil if they are not managed.
func (cs *Controllers) Prepare() (*Endpoints, error) {
	cs.Informers.Core().V1().Namespaces().Informer()
	cs.Informers.Core().V1().Services().Informer()
	cs.Informers.Discovery().V1().EndpointSlices().Informer()
	if cs.AdvertiseAddress == notManaged ||
		reconcilers.Type(cs.EndpointReconciler) == reconcilers.NoneEndpointReconcilerType {
		return nil, nil
	}
	fixed := net.ParseIP(cs.AdvertiseAddress)
	if cs.AdvertiseAddress != "" && fixed == nil {
		return nil, fmt.Errorf("--advertise-address %q: neither an IP address nor none", cs.AdvertiseAddress)
	}
	var err error
	cs.endpoints, err = newEndpoints(fixed, &cs.Options, cs.Storage, cs.Client,
		cs.Informers.Core().V1().Services().Lister())
	return cs.endpoints, err
}

// Run runs every controller until ctx ends, or until a start hook fails.
func (cs *Controllers) Run(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	hooks := cs.StartHooks.begin(ctx, cs.hookNames())
	if !cs.waitSynced(ctx) {
		return ctx.Err()
	}
	primary, secondary, err := cs.APIs.ServiceIPRanges()
	if err != nil {
		return err
	}
	// Addresses of Services can be allocated once the default ServiceCIDR exists.
	defaultservicecidr.NewController(primary, secondary, createOrGetClient{cs.Client}).Start(ctx)
	hooks.done(hookServiceCIDR)
	go systemnamespaces.NewController([]string{metav1.NamespaceSystem, metav1.NamespacePublic,
		corev1.NamespaceNodeLease, metav1.NamespaceDefault}, cs.Client,
		cs.Informers.Core().V1().Namespaces()).Run(ctx.Done())
	hooks.done(hookSystemNamespaces)
	cs.startHooks(ctx, append(slices.Clone(cs.Hooks), installer.PostStartHook{
		Name: hookServiceRepair,
		Run:  cs.repairServices,
	}), hooks, fail)
	if err := cs.publishTrust(ctx); err != nil {
		return err
	}
	hooks.done(hookAuthenticationInfo)
	if err := cs.registerAPIServices(ctx, hooks); err != nil {
		return err
	}
	if err := cs.startCRDControllers(ctx); err != nil {
		return err
	}
	hooks.done(hookCRDs)
	go legacytokentracking.NewController(cs.Client).RunWithContext(ctx)
	hooks.done(hookLegacyTokens)
	if HasIdentityLease() {
		go cs.collectIdentityLeases(ctx)
		hooks.done(hookIdentityLease, hookIdentityLeaseGC)
	}
	if hasCoordinatedElection() {
		go func() {
			cs.electCandidates(ctx)
			hooks.done(hookCoordinatedElection)
		}()
	}
	hooks.wait(ctx, hookServiceRepair, repairTimeout) // the kubernetes Service should not be created during it
	cs.awaitAllocators(ctx)
	if err := cs.kubernetesService(ctx, primary); err != nil {
		return err
	}
	hooks.done(hookKubernetesService)
	<-ctx.Done()
	return context.Cause(ctx)
}

func (cs *Controllers) waitSynced(ctx context.Context) bool {
	for _, ok := range cs.Informers.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return false
		}
	}
	return true
}

// allocatorsTimeout bounds awaitAllocators. The range of addresses may be full, or of another family than the default
// ServiceCIDR.
const allocatorsTimeout = 10 * time.Second

// awaitAllocators waits until a Service can get an address, if the kubernetes Service does not exist. Otherwise its
// create would fail, and the controller would retry 10 s later.
func (cs *Controllers) awaitAllocators(ctx context.Context) {
	services := cs.Informers.Core().V1().Services().Lister().Services(metav1.NamespaceDefault)
	if _, err := services.Get("kubernetes"); err == nil || cs.AdvertiseAddress == notManaged {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, allocatorsTimeout)
	defer cancel()
	probe := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "address-probe-"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}},
	}
	for {
		_, err := cs.Client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, probe,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || ctx.Err() != nil {
			return
		}
		slog.Debug("Addresses of Services cannot be allocated yet", "error", err)
		_ = lifecycle.Sleep(ctx, 50*time.Millisecond)
	}
}

// kubernetesService starts the controller of default/kubernetes, if the Service is managed.
func (cs *Controllers) kubernetesService(ctx context.Context, ipRange net.IPNet) error {
	if cs.AdvertiseAddress == notManaged {
		return nil
	}
	_, serviceIP, err := options.ServiceIPRange(ipRange)
	if err != nil {
		return err
	}
	c := kubernetesservice.New(kubernetesservice.Config{
		EndpointReconciler: cs.endpoints.reconciler(),
		EndpointInterval:   10 * time.Second,
		ServiceIP:          serviceIP,
		ServicePort:        443,
		PublicServicePort:  cs.SecurePort,

		KubernetesServiceNodePort: cs.ServiceNodePort,
	}, cs.Client,
		cs.Informers.Core().V1().Services())
	c.Start(ctx.Done())
	return nil
}

// publishTrust starts the controller of kube-system/extension-apiserver-authentication.
func (cs *Controllers) publishTrust(ctx context.Context) error {
	info := clusterauthenticationtrust.ClusterAuthenticationInfo{}
	var authorities []*dynamiccertificates.DynamicFileCAContent
	for _, f := range []struct {
		name, path string
		into       *dynamiccertificates.CAContentProvider
	}{{"client-ca-bundle", cs.ClientCAFile, &info.ClientCA},
		{"request-header", cs.RequestHeaderCAFile, &info.RequestHeaderCA}} {
		if f.path == "" {
			continue
		}
		ca, err := dynamiccertificates.NewDynamicCAContentFromFile(f.name, f.path)
		if err != nil {
			return err
		}
		*f.into, authorities = ca, append(authorities, ca)
	}
	if info.RequestHeaderCA != nil {
		info.RequestHeaderAllowedNames = headerrequest.StaticStringSlice(cs.RequestHeaderNames)
		info.RequestHeaderUsernameHeaders = headerrequest.StaticStringSlice(cs.RequestHeaderUserHeaders)
		info.RequestHeaderUIDHeaders = headerrequest.StaticStringSlice(cs.RequestHeaderUIDHeaders)
		info.RequestHeaderGroupHeaders = headerrequest.StaticStringSlice(cs.RequestHeaderGroups)
		info.RequestHeaderExtraHeaderPrefixes = headerrequest.StaticStringSlice(cs.RequestHeaderExtras)
	}
	c := clusterauthenticationtrust.NewClusterAuthenticationTrustController(info, cs.Client)
	for _, ca := range authorities {
		ca.AddListener(c)
		go ca.Run(ctx, 1)
	}
	go c.Run(ctx, 1)
	return nil
}
