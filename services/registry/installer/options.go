package installer

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/spf13/pflag"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/server/resourceconfig"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	cliflag "k8s.io/component-base/cli/flag"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/cluster/ports"
	"k8s.io/kubernetes/pkg/controlplane"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
)

// Options are kube-apiserver's flags for the served APIs, the addresses of Services, and kubelets.
type Options struct {
	RuntimeConfig         cliflag.ConfigurationMap
	ServiceClusterIPRange string
	ServiceNodePortRange  utilnet.PortRange
	EventTTL              time.Duration
	AllowPrivileged       bool

	KubeletCertFile, KubeletKeyFile, KubeletCAFile string
	KubeletPreferredAddressTypes                   []string
	KubeletTimeout                                 time.Duration
	KubeletPort                                    uint
}

// NewOptions returns the defaults.
func NewOptions() Options {
	return Options{
		RuntimeConfig:        cliflag.ConfigurationMap{},
		ServiceNodePortRange: kubeoptions.DefaultServiceNodePortRange,
	}
}

// AddFlags registers the flags with their defaults.
func (o *Options) AddFlags(fs *pflag.FlagSet) {
	fs.Var(&o.RuntimeConfig, "runtime-config",
		"A set of key=value pairs that enable or disable built-in APIs, as kube-apiserver's: api/all, api/ga, "+
			"api/beta, api/alpha or group/version.")
	fs.StringVar(&o.ServiceClusterIPRange, "service-cluster-ip-range", "10.96.0.0/16",
		"A CIDR notation IP range from which to assign service cluster IPs; at most two dual-stack CIDRs.")
	fs.Var(&o.ServiceNodePortRange, "service-node-port-range",
		"A port range to reserve for services with NodePort visibility.")
	fs.BoolVar(&o.AllowPrivileged, "allow-privileged", false, "If true, allow privileged containers.")
	fs.DurationVar(&o.EventTTL, "event-ttl", time.Hour, "Amount of time to retain events.")
	fs.StringVar(&o.KubeletCertFile, "kubelet-client-certificate", "",
		"Path to a client cert file for TLS to kubelets.")
	fs.StringVar(&o.KubeletKeyFile, "kubelet-client-key", "", "Path to a client key file for TLS to kubelets.")
	fs.StringVar(&o.KubeletCAFile, "kubelet-certificate-authority", "",
		"Path to a cert file for the certificate authority of kubelets.")
	fs.StringSliceVar(&o.KubeletPreferredAddressTypes, "kubelet-preferred-address-types",
		[]string{"Hostname", "InternalDNS", "InternalIP", "ExternalDNS", "ExternalIP"},
		"List of the preferred NodeAddressTypes to use for kubelet connections.")
	fs.DurationVar(&o.KubeletTimeout, "kubelet-timeout", 5*time.Second, "Timeout for kubelet operations.")
	fs.UintVar(&o.KubeletPort, "kubelet-port", ports.KubeletPort, "The port of kubelets whose Node has none.")
	fs.Lookup("kubelet-port").Hidden = true // kube-apiserver has deprecated it
}

// ServiceIPRanges parses --service-cluster-ip-range. The secondary range is empty if the flag has a single range.
func (o *Options) ServiceIPRanges() (primary, secondary net.IPNet, err error) {
	for i, s := range strings.Split(o.ServiceClusterIPRange, ",") {
		_, n, err := net.ParseCIDR(strings.TrimSpace(s))
		if err != nil {
			return primary, secondary, fmt.Errorf("--service-cluster-ip-range %q: %w", o.ServiceClusterIPRange, err)
		}
		if ones, bits := n.Mask.Size(); bits-ones < 3 { // as in k8s.io/kubernetes/pkg/controlplane, ServiceIPRange
			return primary, secondary, fmt.Errorf("--service-cluster-ip-range %q: a range must have at least 8 addresses", s)
		}
		switch i {
		case 0:
			primary = *n
		case 1:
			secondary = *n
		default:
			return primary, secondary, fmt.Errorf("--service-cluster-ip-range %q: must not hold more than 2 ranges",
				o.ServiceClusterIPRange)
		}
	}
	return primary, secondary, nil
}

// APIResourceConfig returns the served APIs: the defaults, changed by --runtime-config.
func (o *Options) APIResourceConfig() (*serverstorage.ResourceConfig, error) {
	changes := cliflag.ConfigurationMap{}
	for key, value := range o.RuntimeConfig {
		// The core group has several names, as in kube-apiserver's Options.Complete.
		core := strings.TrimPrefix(key, "api/")
		switch {
		case core == "v1" || strings.HasPrefix(core, "v1/"):
			changes["/v1"] = value
		case key != "api/legacy":
			changes[key] = value
		}
	}
	enabled := serveroptions.APIEnablementOptions{RuntimeConfig: changes}
	if errs := enabled.Validate(legacyscheme.Scheme, apiextensionsapiserver.Scheme,
		aggregatorscheme.Scheme); len(errs) > 0 {
		return nil, fmt.Errorf("--runtime-config %q: %w", o.RuntimeConfig.String(), errors.Join(errs...))
	}
	defaults := controlplane.DefaultAPIResourceConfigSource()
	defaults.EnableVersions(apiextensionsv1.SchemeGroupVersion, apiregistrationv1.SchemeGroupVersion)
	merged, err := resourceconfig.MergeAPIResourceConfigs(defaults, changes, legacyscheme.Scheme)
	if err != nil {
		return nil, fmt.Errorf("--runtime-config %q: %w", o.RuntimeConfig.String(), err)
	}
	return merged, nil
}
