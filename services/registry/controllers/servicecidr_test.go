package controllers

import (
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

// The create of an existing ServiceCIDR returns AlreadyExists and the existing object.
func TestCreateOrGetServiceCIDR(t *testing.T) {
	cidrs := createOrGetClient{fake.NewClientset()}.NetworkingV1().ServiceCIDRs()
	const first = "10.96.0.0/16"
	for i, cidr := range []string{first, "10.97.0.0/16"} {
		got, err := cidrs.Create(t.Context(), &networkingv1.ServiceCIDR{
			ObjectMeta: metav1.ObjectMeta{Name: "kubernetes"},
			Spec:       networkingv1.ServiceCIDRSpec{CIDRs: []string{cidr}},
		}, metav1.CreateOptions{})
		if apierrors.IsAlreadyExists(err) != (i > 0) || len(got.Spec.CIDRs) != 1 || got.Spec.CIDRs[0] != first {
			t.Errorf("%d: %v, %v", i, got, err)
		}
	}
}
