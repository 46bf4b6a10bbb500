// Package loops keeps a cluster as kube-apiserver would: its namespaces, the kubernetes Service and its endpoints,
// bootstrap RBAC, priority classes, flow-control defaults, service addresses, and the published authentication data.
// One registry at a time runs them, elected through etcd.
package controllers

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/spf13/pflag"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/authentication/request/headerrequest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	"k8s.io/component-helpers/apimachinery/lease"
	api "k8s.io/kubernetes/pkg/apis/core"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
	"k8s.io/kubernetes/pkg/controlplane/apiserver/options"
	"k8s.io/kubernetes/pkg/controlplane/controller/apiserverleasegc"
	"k8s.io/kubernetes/pkg/controlplane/controller/clusterauthenticationtrust"
	"k8s.io/kubernetes/pkg/controlplane/controller/defaultservicecidr"
	"k8s.io/kubernetes/pkg/controlplane/controller/kubernetesservice"
	"k8s.io/kubernetes/pkg/controlplane/controller/legacytokentracking"
	"k8s.io/kubernetes/pkg/controlplane/controller/systemnamespaces"
	"k8s.io/kubernetes/pkg/controlplane/reconcilers"
	"k8s.io/utils/clock"

	aggregator "k8s.io/kube-aggregator/pkg/apiserver"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/storage"
)

// ElectionKey is where registries elect the one that runs the loops.
const ElectionKey = "/watershed/loops"

// identityName is what kube-apiserver's identity leases are labelled with.
const identityName = "kube-apiserver"

// Options are kube-apiserver's flags that the loops need.
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
}

// AddFlags registers the flags of the control plane's loops, with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&o.AdvertiseAddress, "advertise-address", "",
		"The IP address of the gateway (or its load balancer) that the kubernetes Service points to. Empty: the "+
			"host's default interface. none: the Service has no endpoints of ours.")
	fs.IntVar(&o.SecurePort, "secure-port", 6443, "The port of the gateway that the kubernetes Service points to.")
	fs.StringVar(&o.ClientCAFile, "client-ca-file", "",
		"The clients' certificate authority, published in extension-apiserver-authentication.")
	fs.StringVar(&o.RequestHeaderCAFile, "requestheader-client-ca-file", "",
		"The front proxies' certificate authority, published likewise.")
	fs.BoolVar(&o.AggregatorRouting, "enable-aggregator-routing", false,
		"Turns on routing of requests for aggregated API servers and webhooks to endpoints' addresses rather than "+
			"to cluster IPs.")
	fs.StringVar(&o.ProxyClientCertFile, "proxy-client-cert-file", "",
		"Client certificate with which aggregated API servers are asked whether they are there.")
	fs.StringVar(&o.ProxyClientKeyFile, "proxy-client-key-file", "",
		"Private key for the client certificate of --proxy-client-cert-file.")
	fs.StringSliceVar(&o.RequestHeaderNames, "requestheader-allowed-names", nil,
		"Client certificate common names of allowed front proxies.")
	fs.StringSliceVar(&o.RequestHeaderUserHeaders, "requestheader-username-headers", []string{"X-Remote-User"},
		"Request headers to inspect for usernames.")
	fs.StringSliceVar(&o.RequestHeaderUIDHeaders, "requestheader-uid-headers", nil,
		"Request headers to inspect for UIDs.")
	fs.StringSliceVar(&o.RequestHeaderGroups, "requestheader-group-headers", []string{"X-Remote-Group"},
		"Request headers to inspect for groups.")
	fs.StringSliceVar(&o.RequestHeaderExtras, "requestheader-extra-headers-prefix", []string{"X-Remote-Extra-"},
		"Request header prefixes to inspect.")
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
	// Extensions and Customs are the definitions and what they define.
	Extensions extensions.SharedInformerFactory
	CRClients  finalizer.CRClientGetter
	// Services finds the addresses of aggregated servers.
	Services aggregator.ServiceResolver
	// Dialer dials them; nil: directly.
	Dialer *transport.DialHolder

	address net.IP
}

// Prepare registers the informers that the loops read, before these start.
func (cs *Controllers) Prepare() error {
	cs.Informers.Core().V1().Namespaces().Informer()
	cs.Informers.Core().V1().Services().Informer()
	cs.Informers.Discovery().V1().EndpointSlices().Informer()
	if cs.AdvertiseAddress == "none" {
		return nil
	}
	cs.address = net.ParseIP(cs.AdvertiseAddress)
	if cs.AdvertiseAddress != "" && cs.address == nil {
		return fmt.Errorf("--advertise-address %q: not an IP address, nor none", cs.AdvertiseAddress)
	}
	if cs.address == nil {
		ip, err := utilnet.ResolveBindAddress(net.IPv4zero)
		if err != nil {
			slog.Warn("No address to advertise: the kubernetes Service will have no endpoints", "flag",
				"--advertise-address", "error", err)
			return nil
		}
		cs.address = ip
	}
	return nil
}

// Run runs every loop until ctx is done.
func (cs *Controllers) Run(ctx context.Context) error {
	if !cs.waitSynced(ctx) {
		return ctx.Err()
	}
	primary, secondary, err := cs.APIs.ServiceIPRanges()
	if err != nil {
		return err
	}
	// Service addresses can be given once the default ServiceCIDR is there.
	defaultservicecidr.NewController(primary, secondary, createOrGetClient{cs.Client}).Start(ctx)
	go systemnamespaces.NewController([]string{metav1.NamespaceSystem, metav1.NamespacePublic,
		corev1.NamespaceNodeLease, metav1.NamespaceDefault}, cs.Client,
		cs.Informers.Core().V1().Namespaces()).Run(ctx.Done())
	for _, h := range cs.Hooks {
		go func() {
			if err := h.Run(genericapiserver.PostStartHookContext{
				LoopbackClientConfig: cs.Loopback,
				Context:              ctx,
			}); err != nil && ctx.Err() == nil {
				slog.Error("A start hook failed", "hook", h.Name, "error", err)
			}
		}()
	}
	if err := cs.publishTrust(ctx); err != nil {
		return err
	}
	if err := cs.registerAPIServices(ctx); err != nil {
		return err
	}
	if err := cs.startCRDControllers(ctx); err != nil {
		return err
	}
	go legacytokentracking.NewController(cs.Client).RunWithContext(ctx)
	cs.startIdentityLease(ctx)
	if err := cs.allocatorsReady(ctx); err != nil {
		return err
	}
	if err := cs.kubernetesService(ctx, primary); err != nil {
		return err
	}
	<-ctx.Done()
	return ctx.Err()
}

func (cs *Controllers) waitSynced(ctx context.Context) bool {
	for _, ok := range cs.Informers.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return false
		}
	}
	return true
}

// allocatorsReady waits until a Service could get an address: before that the kubernetes Service would be refused and
// tried again ten seconds later.
func (cs *Controllers) allocatorsReady(ctx context.Context) error {
	probe := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "address-probe-"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}},
	}
	for {
		_, err := cs.Client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, probe,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || ctx.Err() != nil {
			return ctx.Err()
		}
		slog.Debug("Service addresses cannot be given yet", "error", err)
		select {
		case <-ctx.Done():
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// kubernetesService keeps default/kubernetes and its endpoints.
func (cs *Controllers) kubernetesService(ctx context.Context, ipRange net.IPNet) error {
	if cs.address == nil {
		return nil
	}
	_, serviceIP, err := options.ServiceIPRange(ipRange)
	if err != nil {
		return err
	}
	const ttl = 15 * time.Second
	config, err := cs.Storage.Factory.NewConfig(api.Resource("apiServerIPInfo"), &api.Endpoints{})
	if err != nil {
		return err
	}
	leases, err := reconcilers.NewLeases(config, "/masterleases/", ttl)
	if err != nil {
		return err
	}
	adapter := reconcilers.NewEndpointsAdapter(cs.Client.CoreV1(), cs.Client.DiscoveryV1())
	reconciler := reconcilers.NewLeaseEndpointReconciler(adapter, leases)
	c := kubernetesservice.New(kubernetesservice.Config{
		PublicIP:           cs.address,
		EndpointReconciler: reconciler,
		EndpointInterval:   10 * time.Second,
		ServiceIP:          serviceIP,
		ServicePort:        443,
		PublicServicePort:  cs.SecurePort,
	}, cs.Client,
		cs.Informers.Core().V1().Services())
	c.Start(ctx.Done())
	return nil
}

// publishTrust keeps kube-system/extension-apiserver-authentication.
func (cs *Controllers) publishTrust(ctx context.Context) error {
	info := clusterauthenticationtrust.ClusterAuthenticationInfo{}
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
		go ca.Run(ctx, 1)
		*f.into = ca
	}
	if info.RequestHeaderCA != nil {
		info.RequestHeaderAllowedNames = headerrequest.StaticStringSlice(cs.RequestHeaderNames)
		info.RequestHeaderUsernameHeaders = headerrequest.StaticStringSlice(cs.RequestHeaderUserHeaders)
		info.RequestHeaderUIDHeaders = headerrequest.StaticStringSlice(cs.RequestHeaderUIDHeaders)
		info.RequestHeaderGroupHeaders = headerrequest.StaticStringSlice(cs.RequestHeaderGroups)
		info.RequestHeaderExtraHeaderPrefixes = headerrequest.StaticStringSlice(cs.RequestHeaderExtras)
	}
	c := clusterauthenticationtrust.NewClusterAuthenticationTrustController(info, cs.Client)
	go c.Run(ctx, 1)
	return nil
}

// startIdentityLease keeps the API server's identity lease and removes those of servers that are gone.
func (cs *Controllers) startIdentityLease(ctx context.Context) {
	seconds := int32(controlplaneapiserver.IdentityLeaseDurationSeconds)
	c := lease.NewController(clock.RealClock{}, cs.Client, cs.Identity, seconds, nil,
		controlplaneapiserver.IdentityLeaseRenewIntervalPeriod,
		"apiserver-watershed", metav1.NamespaceSystem, func(o *coordinationv1.Lease) error {
			if o.Labels == nil {
				o.Labels = map[string]string{}
			}
			o.Labels[controlplaneapiserver.IdentityLeaseComponentLabelKey] = identityName
			return nil
		})
	go c.Run(ctx)
	go apiserverleasegc.NewAPIServerLeaseGC(cs.Client, controlplaneapiserver.IdentityLeaseGCPeriod,
		metav1.NamespaceSystem,
		controlplaneapiserver.IdentityLeaseComponentLabelKey+"="+identityName).RunWithContext(ctx)
}
