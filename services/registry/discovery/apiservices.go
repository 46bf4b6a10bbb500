package discovery

import (
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration/v1/helper"
	registrationsclient "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	registrations "k8s.io/kube-aggregator/pkg/client/informers/externalversions"
	registrationlisters "k8s.io/kube-aggregator/pkg/client/listers/apiregistration/v1"
	"k8s.io/utils/ptr"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// APIServices lists the group versions that aggregated API servers serve, with the addresses of these servers.
type APIServices struct {
	Informers   registrations.SharedInformerFactory
	apiServices registrationlisters.APIServiceLister
	services    corelisters.ServiceLister
	slices      discoverylisters.EndpointSliceLister
	// routeToEndpoints: connect to a service's endpoints, not to its cluster IP (--enable-aggregator-routing).
	routeToEndpoints bool
}

// WatchAPIServices adds APIServices and their services' addresses to discovery. config is a client of the cluster
// itself. The caller runs the informers of APIServices and of core.
func (d *Discovery) WatchAPIServices(config *restclient.Config,
	core informers.SharedInformerFactory, routeToEndpoints bool) error {
	client, err := registrationsclient.NewForConfig(config)
	if err != nil {
		return err
	}
	r := &APIServices{
		Informers:        registrations.NewSharedInformerFactory(client, 5*time.Minute),
		routeToEndpoints: routeToEndpoints,
		services:         core.Core().V1().Services().Lister(),
		slices:           core.Discovery().V1().EndpointSlices().Lister(),
	}
	all := r.Informers.Apiregistration().V1().APIServices()
	r.apiServices = all.Lister()
	d.APIServices = r
	touch := func(any) { d.Invalidate() }
	if _, err := all.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    touch,
		DeleteFunc: touch,
		UpdateFunc: func(_, o any) { touch(o) },
	}); err != nil {
		return err
	}
	// A service is relevant only while an APIService refers to it.
	onServiceChange := func(name func(any) (namespace, service string)) cache.ResourceEventHandler {
		check := func(o any) {
			if tombstone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = tombstone.Obj
			}
			if ns, service := name(o); r.references(ns, service) {
				d.Invalidate()
			}
		}
		return cache.ResourceEventHandlerFuncs{
			AddFunc:    check,
			DeleteFunc: check,
			UpdateFunc: func(_, o any) { check(o) },
		}
	}
	if _, err := core.Core().V1().Services().Informer().AddEventHandler(onServiceChange(func(o any) (string, string) {
		if service, ok := o.(*corev1.Service); ok {
			return service.Namespace, service.Name
		}
		return "", ""
	})); err != nil {
		return err
	}
	_, err = core.Discovery().
		V1().
		EndpointSlices().
		Informer().
		AddEventHandler(onServiceChange(func(o any) (string, string) {
			if slice, ok := o.(*discoveryv1.EndpointSlice); ok {
				return slice.Namespace, slice.Labels[discoveryv1.LabelServiceName]
			}
			return "", ""
		}))
	return err
}

// remoteAPIServices returns the APIServices that have a service, sorted by name. It omits the core group, which the
// gateway never proxies, and the group of APIServices, as in kube-apiserver. Otherwise no request could delete an
// APIService that takes over its own API.
func (r *APIServices) remoteAPIServices() []*apiregistrationv1.APIService {
	registered, err := r.apiServices.List(labels.Everything())
	if err != nil {
		return nil
	}
	registered = slices.DeleteFunc(slices.Clone(registered), func(a *apiregistrationv1.APIService) bool {
		return a.Spec.Service == nil || a.Spec.Group == "" || a.Spec.Group == apiregistrationv1.GroupName
	})
	slices.SortFunc(registered, func(a, b *apiregistrationv1.APIService) int { return strings.Compare(a.Name, b.Name) })
	return registered
}

func (r *APIServices) references(namespace, service string) bool {
	return slices.ContainsFunc(r.remoteAPIServices(), func(a *apiregistrationv1.APIService) bool {
		return a.Spec.Service.Namespace == namespace && a.Spec.Service.Name == service
	})
}

// add adds the APIServices to a discovery response, and their group versions to into.
func (r *APIServices) add(c *registryv1.DiscoveryResponse, into *groups) {
	for _, a := range r.remoteAPIServices() {
		into.add(schema.GroupVersion{
			Group:   a.Spec.Group,
			Version: a.Spec.Version,
		}, a.Spec.GroupPriorityMinimum, a.Spec.VersionPriority)
		port := ptr.Deref(a.Spec.Service.Port, 443)
		apiService := &registryv1.APIService{
			Group:                 a.Spec.Group,
			Version:               a.Spec.Version,
			ServiceNamespace:      a.Spec.Service.Namespace,
			ServiceName:           a.Spec.Service.Name,
			Port:                  port,
			InsecureSkipTlsVerify: a.Spec.InsecureSkipTLSVerify,
			CaBundle:              a.Spec.CABundle,
			Available:             helper.IsAPIServiceConditionTrue(a, apiregistrationv1.Available),
		}
		apiService.Addresses, _ = r.addresses(a.Spec.Service.Namespace, a.Spec.Service.Name, port)
		c.ApiServices = append(c.ApiServices, apiService)
	}
}

// addresses returns the addresses of a service's port: its cluster IP, its external name, or its ready endpoints.
func (r *APIServices) addresses(namespace, name string, port int32) ([]string, error) {
	service, err := r.services.Services(namespace).Get(name)
	if err != nil {
		return nil, err
	}
	if service.Spec.Type == corev1.ServiceTypeExternalName {
		if r.routeToEndpoints {
			return nil, fmt.Errorf("service %s/%s has a name for its endpoints", namespace, name)
		}
		return []string{net.JoinHostPort(service.Spec.ExternalName, strconv.Itoa(int(port)))}, nil
	}
	i := slices.IndexFunc(service.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == port })
	if i < 0 {
		return nil, fmt.Errorf("service %s/%s has no port %d", namespace, name, port)
	}
	if !r.routeToEndpoints {
		if service.Spec.ClusterIP == "" || service.Spec.ClusterIP == corev1.ClusterIPNone {
			return nil, fmt.Errorf("service %s/%s has no cluster IP", namespace, name)
		}
		return []string{net.JoinHostPort(service.Spec.ClusterIP, strconv.Itoa(int(port)))}, nil
	}
	named := labels.SelectorFromSet(labels.Set{discoveryv1.LabelServiceName: name})
	endpointSlices, err := r.slices.EndpointSlices(namespace).List(named)
	if err != nil {
		return nil, err
	}
	var all, others []string // others are of another family than the primary
	for _, slice := range endpointSlices {
		addresses := &all
		if families := service.Spec.IPFamilies; len(families) > 0 && string(slice.AddressType) != string(families[0]) {
			addresses = &others
		}
		for _, p := range slice.Ports {
			if p.Port == nil || ptr.Deref(p.Name, "") != service.Spec.Ports[i].Name {
				continue
			}
			for _, e := range slice.Endpoints {
				if len(e.Addresses) > 0 && (e.Conditions.Ready == nil || *e.Conditions.Ready) {
					*addresses = append(*addresses, net.JoinHostPort(e.Addresses[0], strconv.Itoa(int(*p.Port))))
				}
			}
		}
	}
	if len(all) == 0 {
		all = others
	}
	slices.Sort(all)
	return all, nil
}
