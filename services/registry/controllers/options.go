package controllers

import (
	"fmt"

	"github.com/spf13/pflag"
	"k8s.io/kubernetes/pkg/controlplane/controller/leaderelection"
	"k8s.io/kubernetes/pkg/controlplane/reconcilers"
)

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
