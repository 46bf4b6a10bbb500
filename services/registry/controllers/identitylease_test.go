package controllers

import (
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
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
