package controllers

import (
	"net"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/services/registry/internal/fixture"
)

// expectEndpoints fails the test unless the addresses of all Endpoints equal want.
func expectEndpoints(t *testing.T, client kubernetes.Interface, want ...string) {
	t.Helper()
	var got []string
	//nolint:staticcheck // the reconciler still writes Endpoints
	all, err := client.CoreV1().Endpoints(metav1.NamespaceDefault).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range all.Items {
		for _, s := range o.Subsets {
			for _, a := range s.Addresses {
				got = append(got, a.IP)
			}
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("the endpoints are %q, not %q", got, want)
	}
}

// The reconciler master-count keeps --apiserver-count addresses without leases.
func TestMasterCountKeepsAsManyEndpoints(t *testing.T) {
	client := fake.NewClientset()
	o := &Options{SecurePort: 6443, EndpointReconciler: "master-count", APIServerCount: 2}
	e, err := newEndpoints(nil, o, fixture.New(t).Resources.Storage, client, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, address := range []string{"192.0.2.1", "192.0.2.2", "192.0.2.3"} {
		if err := e.Renew(address); err != nil {
			t.Fatal(err)
		}
	}
	expectEndpoints(t, client, "192.0.2.2", "192.0.2.3")
	if err := e.Remove("192.0.2.3"); err != nil {
		t.Fatal(err)
	}
	expectEndpoints(t, client, "192.0.2.2")
}

// The addresses of live gateways are the endpoints of the kubernetes Service, once it exists. The elected registry adds
// none of its own. The last address is removed too.
func TestEndpointsAreTheGateways(t *testing.T) {
	services := cache.NewIndexer(cache.MetaNamespaceKeyFunc, cache.Indexers{})
	client := fake.NewClientset()
	e, err := newEndpoints(nil, &Options{SecurePort: 6443}, fixture.New(t).Resources.Storage, client,
		corelisters.NewServiceLister(services))
	if err != nil {
		t.Fatal(err)
	}
	expect := func(want ...string) {
		t.Helper()
		expectEndpoints(t, client, want...)
	}
	step := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	step(e.Renew("192.0.2.1"))
	expect()
	step(services.Add(&corev1.Service{ObjectMeta: metav1.ObjectMeta{
		Namespace: metav1.NamespaceDefault, Name: kubernetesServiceName}}))
	step(e.reconciler().ReconcileEndpoints(kubernetesServiceName, nil, e.ports, false))
	expect("192.0.2.1")
	step(e.Renew("192.0.2.2"))
	expect("192.0.2.1", "192.0.2.2")
	step(e.Remove("192.0.2.1"))
	step(e.Remove("192.0.2.1"))
	expect("192.0.2.2")
	step(e.Remove("192.0.2.2"))
	expect()
	for _, bad := range []string{"", "<nil>", "127.0.0.1", "0.0.0.0", "169.254.1.1"} {
		if a := e.Address(bad); a != "" {
			t.Errorf("%q becomes the endpoint %q", bad, a)
		}
	}
	e.fixed = net.ParseIP("192.0.2.9")
	if a, none := e.Address("192.0.2.1"), e.Address(""); a != "192.0.2.9" || none != "" {
		t.Errorf("%q, %q", a, none)
	}
}
