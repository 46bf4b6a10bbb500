package discovery

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	discoverylisters "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// An aggregated server has the ready endpoints of the Service's primary family. If there are none, it has the others,
// as in kube-apiserver.
func TestAddressesOfEndpoints(t *testing.T) {
	services := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	endpoints := cache.NewIndexer(cache.MetaNamespaceKeyFunc,
		cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	meta := metav1.ObjectMeta{
		Namespace: "x",
		Name:      "web",
		Labels:    map[string]string{discoveryv1.LabelServiceName: "web"},
	}
	if err := services.Add(&corev1.Service{ObjectMeta: meta, Spec: corev1.ServiceSpec{
		IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol}, Ports: []corev1.ServicePort{{Port: 443}},
	}}); err != nil {
		t.Fatal(err)
	}
	add := func(name, family, address string, ready bool) {
		t.Helper()
		meta.Name = name
		if err := endpoints.Add(&discoveryv1.EndpointSlice{
			ObjectMeta:  meta,
			AddressType: discoveryv1.AddressType(family),
			Ports:       []discoveryv1.EndpointPort{{Port: ptr.To(int32(8443))}},
			Endpoints: []discoveryv1.Endpoint{{
				Addresses:  []string{address},
				Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(ready)},
			}},
		}); err != nil {
			t.Fatal(err)
		}
	}
	r := &APIServices{
		services:         corelisters.NewServiceLister(services),
		slices:           discoverylisters.NewEndpointSliceLister(endpoints),
		routeToEndpoints: true,
	}
	expect := func(want ...string) {
		t.Helper()
		if got, err := r.addresses("x", "web", 443); err != nil || !slices.Equal(got, want) {
			t.Errorf("%q, %v, not %q", got, err, want)
		}
	}
	expect()
	add("six", "IPv6", "fd00::1", true)
	expect("[fd00::1]:8443")
	add("late", "IPv4", "10.0.0.2", false)
	expect("[fd00::1]:8443")
	add("four", "IPv4", "10.0.0.1", true)
	expect("10.0.0.1:8443")
}
