package controllers

import (
	"context"
	"maps"
	"testing"
	"testing/synctest"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"watershed.dev/services/registry/internal/fixture"
)

// The lease has kube-apiserver's name: a host whose kube-apiserver is replaced keeps its lease.
func TestTheLeaseHasKubeAPIServersName(t *testing.T) {
	if got := leaseName("kind-control-plane"); got != "apiserver-c7uylvfxlbqccnk6myfkwetzze" {
		t.Errorf("the name is %q", got)
	}
}

// A registry that finds the identity lease renewed by another does not fail. It fails if the lease is not renewed.
func TestRegistriesShareAnIdentityLease(t *testing.T) {
	for name, c := range map[string]struct {
		renewed time.Duration
		fails   bool
	}{"just renewed": {time.Second, false}, "not renewed": {time.Hour, true}} {
		t.Run(name, func(t *testing.T) {
			renewedAt := metav1.NewMicroTime(time.Now().Add(-c.renewed))
			current := &coordinationv1.Lease{
				ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "apiserver-a"},
				Spec:       coordinationv1.LeaseSpec{RenewTime: &renewedAt},
			}
			client := fake.NewClientset(current)
			client.PrependReactor("update", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
				return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "leases"}, "apiserver-a", nil)
			})
			leases := sharedLeases{client}.CoordinationV1().Leases("kube-system")
			got, err := leases.Update(t.Context(), current.DeepCopy(), metav1.UpdateOptions{})
			if c.fails != apierrors.IsConflict(err) || !c.fails && !got.Spec.RenewTime.Equal(&renewedAt) {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
}

// awaitHolder waits until the identity lease of a host has a holder. An empty holder: the lease does not exist.
func awaitHolder(t *testing.T, client kubernetes.Interface, host, want string) {
	t.Helper()
	if want != "" {
		want = leaseName(host) + "_" + want
	}
	var got string
	if err := wait.PollUntilContextTimeout(t.Context(), 10*time.Millisecond, 2*time.Minute, true,
		func(ctx context.Context) (bool, error) {
			o, err := client.CoordinationV1().Leases("kube-system").Get(ctx, leaseName(host), metav1.GetOptions{})
			if err != nil && !apierrors.IsNotFound(err) {
				return false, err
			}
			got = ""
			if err == nil {
				got = ptr.Deref(o.Spec.HolderIdentity, "")
			}
			return got == want, nil
		}); err != nil {
		t.Fatalf("the holder is %q, not %q: %v", got, want, err)
	}
}

// renewLease renews the identity lease of a host until stop is called, or the test ends.
func renewLease(t *testing.T, client kubernetes.Interface, host, identity string) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = renewIdentityLease(ctx, client, host, identity)
	}()
	stop = func() { cancel(); <-done }
	t.Cleanup(stop)
	return stop
}

// A registry that stops deletes its identity lease, but not the lease of another host, or of another registry of its
// host. A lease that exists gets the registry that renews it as its holder.
func TestAStoppedRegistryHasNoIdentityLease(t *testing.T) {
	client := fixture.New(t).Client
	_, err := client.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{
		ObjectMeta: metav1.ObjectMeta{Name: "kube-system"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	stopA := renewLease(t, client, "host", "a")
	awaitHolder(t, client, "host", "a")
	stopB := renewLease(t, client, "host", "b")
	awaitHolder(t, client, "host", "b")
	renewLease(t, client, "other", "c")
	awaitHolder(t, client, "other", "c")
	stopA()
	awaitHolder(t, client, "host", "b")
	stopB()
	awaitHolder(t, client, "host", "")
	awaitHolder(t, client, "other", "c")
}

// A registry that shares the lease of a stopped registry creates it again with its next renewal.
func TestASharedIdentityLeaseComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		renewLease(t, client, "host", "a")
		synctest.Wait()
		stopB := renewLease(t, client, "host", "b")
		synctest.Wait()
		stopB()
		if _, err := client.CoordinationV1().Leases("kube-system").Get(t.Context(), leaseName("host"),
			metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("the stopped registry keeps its lease: %v", err)
		}
		awaitHolder(t, client, "host", "a")
	})
}

// The lease of a replaced kube-apiserver names no address for its peers.
func TestAnIdentityLeaseHasNoPeerAddress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset(&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{
			Namespace: "kube-system", Name: leaseName("host"),
			Annotations: map[string]string{corev1.AnnotationPeerAdvertiseAddress: "192.0.2.1:6443", "other": "kept"},
		}})
		renewLease(t, client, "host", "a")
		synctest.Wait()
		o, err := client.CoordinationV1().Leases("kube-system").Get(t.Context(), leaseName("host"), metav1.GetOptions{})
		if want := map[string]string{"other": "kept"}; err != nil || !maps.Equal(o.Annotations, want) {
			t.Errorf("%v, %v", o, err)
		}
	})
}
