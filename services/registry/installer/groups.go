// Package installer builds the built-in APIs. It turns upstream's storage providers into RequestScopes, discovery
// entries and OpenAPI documents. Package customresources serves CRDs.
//
// A Set does not change after InstallAPIs, so all goroutines may read it. Only the OpenAPI documents are built later,
// under a lock.
//
// # Review notes
//
//   - The order of groups must equal upstream's. OpenAPI documents must equal upstream's byte for byte, because their
//     hashes are in the index.
//   - providers and Priorities copy kube-apiserver at 1.36. Compare both with the new release when the version changes.
//   - OpenAPI documents must be built on request. The definitions take 6 MB, which ReleaseOpenAPIDefinitions drops.
package installer

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/pflag"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsv1beta1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresourcedefinition"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	genericregistry "k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	"k8s.io/apiserver/pkg/server/resourceconfig"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/apiserver/pkg/util/dryrun"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	cliflag "k8s.io/component-base/cli/flag"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	apiregistrationv1beta1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1beta1"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	apiservicerest "k8s.io/kube-aggregator/pkg/registry/apiservice/rest"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/capabilities"
	"k8s.io/kubernetes/pkg/cluster/ports"
	"k8s.io/kubernetes/pkg/controlplane"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"
	kubeletclient "k8s.io/kubernetes/pkg/kubelet/client"
	admissionregistrationrest "k8s.io/kubernetes/pkg/registry/admissionregistration/rest"
	apiserverinternalrest "k8s.io/kubernetes/pkg/registry/apiserverinternal/rest"
	appsrest "k8s.io/kubernetes/pkg/registry/apps/rest"
	authenticationrest "k8s.io/kubernetes/pkg/registry/authentication/rest"
	authorizationrest "k8s.io/kubernetes/pkg/registry/authorization/rest"
	autoscalingrest "k8s.io/kubernetes/pkg/registry/autoscaling/rest"
	batchrest "k8s.io/kubernetes/pkg/registry/batch/rest"
	certificatesrest "k8s.io/kubernetes/pkg/registry/certificates/rest"
	coordinationrest "k8s.io/kubernetes/pkg/registry/coordination/rest"
	corerest "k8s.io/kubernetes/pkg/registry/core/rest"
	"k8s.io/kubernetes/pkg/registry/core/service/allocator"
	serviceallocator "k8s.io/kubernetes/pkg/registry/core/service/allocator/storage"
	discoveryrest "k8s.io/kubernetes/pkg/registry/discovery/rest"
	eventsrest "k8s.io/kubernetes/pkg/registry/events/rest"
	flowcontrolrest "k8s.io/kubernetes/pkg/registry/flowcontrol/rest"
	networkingrest "k8s.io/kubernetes/pkg/registry/networking/rest"
	noderest "k8s.io/kubernetes/pkg/registry/node/rest"
	policyrest "k8s.io/kubernetes/pkg/registry/policy/rest"
	rbacrest "k8s.io/kubernetes/pkg/registry/rbac/rest"
	resourcerest "k8s.io/kubernetes/pkg/registry/resource/rest"
	schedulingrest "k8s.io/kubernetes/pkg/registry/scheduling/rest"
	storagerest "k8s.io/kubernetes/pkg/registry/storage/rest"
	svmrest "k8s.io/kubernetes/pkg/registry/storagemigration/rest"
	"k8s.io/kubernetes/pkg/serviceaccount"

	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/storage"
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

// Deps are the dependencies of the storages besides etcd.
type Deps struct {
	// Loopback is a client config that reaches this registry without HTTP or a socket.
	Loopback  *restclient.Config
	Client    *kubernetes.Clientset
	Informers informers.SharedInformerFactory

	TokenIssuer     serviceaccount.TokenGenerator
	TokenAudiences  []string
	MaxTokenExpiry  time.Duration
	ExtendExpiry    bool
	MaxExtendedTime time.Duration

	// OnCRDUpdate receives each CustomResourceDefinition that this registry has updated.
	OnCRDUpdate func(runtime.Object)
}

// restStorageProvider is upstream's interface of a group's storages.
type restStorageProvider interface {
	GroupName() string
	NewRESTStorage(serverstorage.APIResourceConfigSource,
		genericregistry.RESTOptionsGetter) (genericapiserver.APIGroupInfo, error)
}

func init() {
	storage.AddScheme(apiextensionsapiserver.Scheme)
	storage.AddScheme(aggregatorscheme.Scheme)
}

// PostStartHook is work that upstream does after its server has started: bootstrap policy and repair loops.
type PostStartHook struct {
	Name string
	Run  genericapiserver.PostStartHookFunc
}

// InstallAPIs builds every built-in group, in kube-apiserver's order.
func InstallAPIs(o *Options, s *storage.Storage, resources *serverstorage.ResourceConfig, d Deps) (*Set, error) {
	// Pod validation reads AllowPrivileged. The registry sets no bandwidth limit, because the gateway carries the
	// connections.
	capabilities.Setup(o.AllowPrivileged, 0)
	all, err := providers(o, s, d)
	if err != nil {
		return nil, err
	}
	version := compatibility.DefaultBuildEffectiveVersion()
	kinds, err := genericapiserver.NewResourceExpirationEvaluatorFromOptions(
		genericapiserver.ResourceExpirationEvaluatorOptions{
			CurrentVersion: version.EmulationVersion(),
			Prerelease:     version.BinaryVersion().PreRelease(),
		})
	if err != nil {
		return nil, err
	}
	set := newSet(s.Factory.ResourcePrefix)
	for _, p := range all {
		info, err := p.NewRESTStorage(resources, s.RESTOptions())
		if err != nil {
			return nil, fmt.Errorf("group %q: %w", p.GroupName(), err)
		}
		// Storages of kinds that this version no longer serves exist for emulated versions.
		if err := kinds.RemoveUnavailableKinds(p.GroupName(), info.Scheme, info.VersionedResourcesStorageMap,
			resources); err != nil {
			return nil, fmt.Errorf("group %q: %w", p.GroupName(), err)
		}
		if len(info.VersionedResourcesStorageMap) == 0 {
			continue
		}
		if p.GroupName() == "authentication.k8s.io" {
			info.VersionedResourcesStorageMap["v1"]["tokenreviews"] = handlers.NewTokenReviews(d.TokenAudiences)
		}
		set.groups = append(set.groups, info)
		if h, ok := p.(genericapiserver.PostStartHookProvider); ok {
			name, run, err := h.PostStartHook()
			if err != nil {
				return nil, err
			}
			if name == ServiceRepairHook { // its loops run once in a process; controllers has its own
				continue
			}
			set.Hooks = append(set.Hooks, PostStartHook{name, run})
		}
	}
	extensions, err := crdGroup(s, d.OnCRDUpdate)
	if err != nil {
		return nil, err
	}
	set.groups = append(set.groups, extensions, apiServiceGroup(s, resources))
	return set, set.install(s)
}

// providers returns upstream's storage providers, in the order of k8s.io/kubernetes/pkg/controlplane/instance.go.
func providers(o *Options, s *storage.Storage, d Deps) ([]restStorageProvider, error) {
	config, err := coreConfig(o, s, d)
	if err != nil {
		return nil, err
	}
	core, err := corerest.New(config, handlers.Authorizer{})
	if err != nil {
		return nil, fmt.Errorf("core: %w", err)
	}
	return []restStorageProvider{
		core,
		apiserverinternalrest.StorageProvider{},
		authenticationrest.RESTStorageProvider{},
		authorizationrest.RESTStorageProvider{Authorizer: handlers.Authorizer{}, RuleResolver: handlers.RuleResolver{}},
		autoscalingrest.RESTStorageProvider{},
		batchrest.RESTStorageProvider{},
		certificatesrest.RESTStorageProvider{Authorizer: handlers.Authorizer{}},
		coordinationrest.RESTStorageProvider{},
		discoveryrest.StorageProvider{},
		networkingrest.RESTStorageProvider{},
		noderest.RESTStorageProvider{},
		policyrest.RESTStorageProvider{},
		rbacrest.RESTStorageProvider{Authorizer: handlers.Authorizer{}},
		schedulingrest.RESTStorageProvider{},
		storagerest.RESTStorageProvider{},
		svmrest.RESTStorageProvider{},
		flowcontrolrest.RESTStorageProvider{InformerFactory: d.Informers},
		appsrest.StorageProvider{},
		admissionregistrationrest.RESTStorageProvider{
			Authorizer:      handlers.Authorizer{},
			DiscoveryClient: d.Client.Discovery(),
		},
		eventsrest.RESTStorageProvider{TTL: o.EventTTL},
		resourcerest.RESTStorageProvider{
			NamespaceClient: d.Client.CoreV1().Namespaces(),
			Authorizer:      handlers.Authorizer{},
		},
	}, nil
}

// coreConfig returns the configuration of the core group.
func coreConfig(o *Options, s *storage.Storage, d Deps) (corerest.Config, error) {
	primary, secondary, err := o.ServiceIPRanges()
	return corerest.Config{
		GenericConfig: corerest.GenericConfig{
			StorageFactory:              s.Factory,
			EventTTL:                    o.EventTTL,
			LoopbackClientConfig:        d.Loopback,
			Informers:                   d.Informers,
			ServiceAccountIssuer:        d.TokenIssuer,
			ServiceAccountMaxExpiration: d.MaxTokenExpiry,
			ExtendExpiration:            d.ExtendExpiry,
			MaxExtendedExpiration:       d.MaxExtendedTime,
			APIAudiences:                d.TokenAudiences,
		},
		Proxy: corerest.ProxyConfig{
			Transport: &http.Transport{},
			KubeletClientConfig: kubeletclient.KubeletClientConfig{
				Port:                  o.KubeletPort,
				ReadOnlyPort:          ports.KubeletReadOnlyPort,
				PreferredAddressTypes: o.KubeletPreferredAddressTypes,
				HTTPTimeout:           o.KubeletTimeout,
				TLSClientConfig: kubeletclient.KubeletTLSConfig{CertFile: o.KubeletCertFile, KeyFile: o.KubeletKeyFile,
					CAFile: o.KubeletCAFile},
			},
		},
		Services: corerest.ServicesConfig{
			ClusterIPRange:          primary,
			SecondaryClusterIPRange: secondary,
			NodePortRange:           o.ServiceNodePortRange,
			IPRepairInterval:        RepairInterval,
		},
	}, err
}

// RepairInterval is the pause between two repairs of Service addresses and node ports, as in kube-apiserver
// (k8s.io/kubernetes/pkg/controlplane, repairLoopInterval).
const RepairInterval = 3 * time.Minute

// ServiceRepairHook is the name of upstream's start hook of these repairs.
const ServiceRepairHook = "start-service-ip-repair-controllers"

// NodePorts returns etcd's record of the allocated node ports, for a repair loop
// (k8s.io/kubernetes/pkg/registry/core/rest, newServiceIPAllocators). The caller destroys it.
func (o *Options) NodePorts(s *storage.Storage) (*serviceallocator.Etcd, error) {
	config, err := s.Factory.NewConfig(api.Resource("services"), &api.Service{})
	if err != nil {
		return nil, err
	}
	r := o.ServiceNodePortRange
	return serviceallocator.NewEtcd(allocator.NewAllocationMap(r.Size, r.String()), "/ranges/servicenodeports",
		config.ForResource(api.Resource("servicenodeportallocations")))
}

// crdGroup returns the group apiextensions.k8s.io. etcd holds its objects in the same encoding as with kube-apiserver.
func crdGroup(s *storage.Storage, onUpdate func(runtime.Object)) (genericapiserver.APIGroupInfo, error) {
	info := genericapiserver.NewDefaultAPIGroupInfo(apiextensionsv1.GroupName, apiextensionsapiserver.Scheme,
		metav1.ParameterCodec, apiextensionsapiserver.Codecs)
	options := s.RESTOptionsFor(
		apiextensionsapiserver.Codecs.LegacyCodec(apiextensionsv1beta1.SchemeGroupVersion,
			apiextensionsv1.SchemeGroupVersion),
		runtime.NewMultiGroupVersioner(apiextensionsv1beta1.SchemeGroupVersion,
			schema.GroupKind{Group: apiextensionsv1beta1.GroupName}))
	crds, err := customresourcedefinition.NewREST(apiextensionsapiserver.Scheme, options)
	if err != nil {
		return info, err
	}
	crds.AfterUpdate = func(obj runtime.Object, options *metav1.UpdateOptions) {
		if !dryrun.IsDryRun(options.DryRun) {
			onUpdate(obj)
		}
	}
	info.VersionedResourcesStorageMap["v1"] = map[string]rest.Storage{
		"customresourcedefinitions":        crds,
		"customresourcedefinitions/status": customresourcedefinition.NewStatusREST(apiextensionsapiserver.Scheme, crds),
	}
	return info, nil
}

// apiServiceGroup returns the group apiregistration.k8s.io.
func apiServiceGroup(s *storage.Storage, resources *serverstorage.ResourceConfig) genericapiserver.APIGroupInfo {
	return apiservicerest.NewRESTStorage(resources, s.RESTOptionsFor(
		aggregatorscheme.Codecs.LegacyCodec(apiregistrationv1.SchemeGroupVersion,
			apiregistrationv1beta1.SchemeGroupVersion),
		runtime.NewMultiGroupVersioner(apiregistrationv1.SchemeGroupVersion,
			schema.GroupKind{Group: apiregistrationv1.GroupName})), false)
}

// Priority orders groups and versions in /apis, as the priorities of APIServices do in kube-aggregator.
type Priority = controlplaneapiserver.APIServicePriority

// Priorities returns kube-apiserver's priorities (cmd/kube-apiserver/app/aggregator.go at 1.36).
func Priorities() map[schema.GroupVersion]Priority {
	p := controlplaneapiserver.DefaultGenericAPIServicePriorities()
	for group, priority := range map[string]struct {
		group    int32
		versions map[string]int32
	}{
		"apps":                   {17800, map[string]int32{"v1": 15}},
		"autoscaling":            {17500, map[string]int32{"v1": 15, "v2": 30}},
		"batch":                  {17400, map[string]int32{"v1": 15}},
		"networking.k8s.io":      {17200, map[string]int32{"v1": 15, "v1beta1": 9}},
		"policy":                 {17100, map[string]int32{"v1": 15, "v1beta1": 9}},
		"storage.k8s.io":         {16800, map[string]int32{"v1": 15, "v1beta1": 9, "v1alpha1": 1}},
		"scheduling.k8s.io":      {16600, map[string]int32{"v1": 15, "v1alpha2": 2}},
		"node.k8s.io":            {16300, map[string]int32{"v1": 15, "v1beta1": 9, "v1alpha1": 1}},
		"resource.k8s.io":        {16200, map[string]int32{"v1": 21, "v1beta2": 15, "v1beta1": 9, "v1alpha3": 1}},
		"apiregistration.k8s.io": {20000, map[string]int32{"v1": 15}},
	} {
		for v, n := range priority.versions {
			p[schema.GroupVersion{Group: group, Version: v}] = Priority{Group: priority.group, Version: n}
		}
	}
	return p
}
