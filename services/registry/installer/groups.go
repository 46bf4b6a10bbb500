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
	"fmt"
	"net/http"
	"time"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	apiextensionsv1beta1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1beta1"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresourcedefinition"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericregistry "k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	serverstorage "k8s.io/apiserver/pkg/server/storage"
	"k8s.io/apiserver/pkg/util/compatibility"
	"k8s.io/apiserver/pkg/util/dryrun"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	apiregistrationv1beta1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1beta1"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	apiservicerest "k8s.io/kube-aggregator/pkg/registry/apiservice/rest"
	"k8s.io/kubernetes/pkg/capabilities"
	"k8s.io/kubernetes/pkg/cluster/ports"
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
