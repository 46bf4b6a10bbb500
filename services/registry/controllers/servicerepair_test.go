package controllers

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
)

// A registry that is elected again repairs the addresses of Services, as in its first term.
func TestAddressesAreRepairedInEachTerm(t *testing.T) {
	service := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "web"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: "10.96.0.7", ClusterIPs: []string{"10.96.0.7"},
			IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
		},
	}
	client := fake.NewClientset(service, &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}},
		Status: networkingv1.ServiceCIDRStatus{
			Conditions: []metav1.Condition{{
				Type:   networkingv1.ServiceCIDRConditionReady,
				Status: metav1.ConditionTrue,
			}},
		},
	})
	cs := &Controllers{Informers: informers.NewSharedInformerFactory(client, 0)}
	cs.addressRepair(t.Context(), client) // registers the informers
	cs.Informers.Start(t.Context().Done())
	cs.Informers.WaitForCacheSync(t.Context().Done())
	addresses := client.NetworkingV1().IPAddresses()
	await := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
			_, err := addresses.Get(t.Context(), "10.96.0.7", metav1.GetOptions{})
			if err == nil {
				return
			}
			if !apierrors.IsNotFound(err) || time.Now().After(deadline) {
				t.Fatalf("%s: %v", what, err)
			}
		}
	}
	for _, term := range []string{"the first term", "the second term"} {
		ctx, cancel := context.WithCancel(t.Context())
		stop, first, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
		loop := cs.addressRepair(ctx, client)
		go func() { defer close(done); loop.RunUntil(func() { close(first) }, stop) }()
		select {
		case <-first:
		case <-time.After(time.Minute):
			t.Fatal(term + ": no first repair within a minute")
		}
		await(term + ", the first repair")
		if err := addresses.Delete(ctx, "10.96.0.7", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		known := cs.Informers.Networking().V1().IPAddresses().Lister()
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) { // the repair reads the informer
			if _, err := known.Get("10.96.0.7"); apierrors.IsNotFound(err) || time.Now().After(deadline) {
				break
			}
		}
		service = service.DeepCopy()
		service.Annotations = map[string]string{"term": term}
		if _, err := client.CoreV1().Services("default").Update(ctx, service, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		await(term + ", after a deletion")
		cancel()
		close(stop)
		<-done
	}
}

// The handlers of a term receive no events after it.
func TestHandlersEndWithTheirTerm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		factory := informers.NewSharedInformerFactory(client, 0)
		services := factory.Core().V1().Services()
		received := func(ctx context.Context) *atomic.Int64 {
			n := &atomic.Int64{}
			handler := cache.ResourceEventHandlerFuncs{AddFunc: func(any) { n.Add(1) }}
			i := forTerm(ctx, services).Informer()
			for _, add := range []func() (cache.ResourceEventHandlerRegistration, error){
				func() (cache.ResourceEventHandlerRegistration, error) { return i.AddEventHandler(handler) },
				func() (cache.ResourceEventHandlerRegistration, error) {
					return i.AddEventHandlerWithResyncPeriod(handler, time.Minute)
				},
				func() (cache.ResourceEventHandlerRegistration, error) {
					return i.AddEventHandlerWithOptions(handler, cache.HandlerOptions{})
				},
			} {
				if _, err := add(); err != nil {
					t.Fatal(err)
				}
			}
			return n
		}
		term, end := context.WithCancel(t.Context())
		process, stop := context.WithCancel(t.Context())
		ended, current := received(term), received(process)
		factory.Start(process.Done())
		factory.WaitForCacheSync(process.Done())
		create := func(name string) {
			t.Helper()
			s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
			_, err := client.CoreV1().Services("default").Create(t.Context(), s, metav1.CreateOptions{})
			if err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		create("during")
		if ended.Load() != 3 || current.Load() != 3 {
			t.Errorf("%d and %d events during the term", ended.Load(), current.Load())
		}
		end()
		synctest.Wait()
		create("after")
		if ended.Load() != 3 || current.Load() != 6 {
			t.Errorf("%d and %d events after the term", ended.Load(), current.Load())
		}
		stop()
		factory.Shutdown()
	})
}
