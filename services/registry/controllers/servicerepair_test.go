package controllers

import (
	"context"
	"errors"
	"strconv"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/internal/fixture"
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
	touches := 0
	touch := func() { // a Service's event makes the loop compare its address, in the informer, with the Service
		touches++
		service = service.DeepCopy()
		service.Annotations = map[string]string{"touched": strconv.Itoa(touches)}
		_, err := client.CoreV1().Services("default").Update(t.Context(), service, metav1.UpdateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	await := func(what string) {
		t.Helper()
		for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(10 * time.Millisecond) {
			_, err := addresses.Get(t.Context(), "10.96.0.7", metav1.GetOptions{})
			if err == nil {
				return
			}
			if !apierrors.IsNotFound(err) || time.Now().After(deadline) {
				t.Fatalf("%s: %v", what, err)
			}
			touch()
		}
	}
	for _, term := range []string{"the first term", "the second term"} {
		ctx, cancel := context.WithCancel(t.Context())
		stop, first, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
		loop := cs.addressRepair(ctx, client)
		go func() { defer close(done); loop.RunUntil(func() { close(first) }, stop) }()
		select {
		case <-first:
		case <-time.After(2 * time.Minute):
			t.Fatal(term + ": no first repair")
		}
		await(term + ", the first repair")
		if err := addresses.Delete(ctx, "10.96.0.7", metav1.DeleteOptions{}); err != nil {
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

// Both repairs run in each term, and report their first success.
func TestRepairServicesInEachTerm(t *testing.T) {
	fx := fixture.New(t)
	_, err := fx.Client.NetworkingV1().ServiceCIDRs().Create(t.Context(), &networkingv1.ServiceCIDR{
		ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
		Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.96.0.0/16"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	apis := installer.NewOptions()
	cs := &Controllers{
		Informers: informers.NewSharedInformerFactory(fx.Client, 0),
		Client:    fx.Client,
		Storage:   fx.Resources.Storage,
		APIs:      &apis,
	}
	cs.addressRepair(t.Context(), fx.Client) // registers the informers
	process, stop := context.WithCancel(t.Context())
	defer cs.Informers.Shutdown()
	defer stop()
	cs.Informers.Start(process.Done())
	cs.Informers.WaitForCacheSync(process.Done())
	const key = "/registry/ranges/servicenodeports"
	for _, term := range []string{"the first term", "the second term"} {
		ctx, end := context.WithCancel(t.Context())
		if err := cs.repairServices(genericapiserver.PostStartHookContext{Context: ctx}); err != nil {
			t.Errorf("%s: %v", term, err)
		}
		stored, err := fx.Resources.Storage.Client.Client.Get(t.Context(), key)
		if err != nil || len(stored.Kvs) != 1 {
			t.Errorf("%s: the record of node ports: %v, %v", term, stored, err)
		}
		if _, err := fx.Resources.Storage.Client.Client.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
		end()
	}
	ended, end := context.WithCancel(t.Context())
	end()
	err = cs.repairServices(genericapiserver.PostStartHookContext{Context: ended})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("a term that has ended: %v", err)
	}
}
