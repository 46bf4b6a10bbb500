package controllers

import (
	"context"

	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	typednetworkingv1 "k8s.io/client-go/kubernetes/typed/networking/v1"
)

// Upstream's controller of the default ServiceCIDR (k8s.io/kubernetes/pkg/controlplane/controller/defaultservicecidr)
// syncs again right after it has created the ServiceCIDR. Its informer may not have the object yet, so the controller
// creates it a second time. The response is AlreadyExists with an empty object. The controller then reports in an Event
// that the empty object does not match the flags. createOrGetClient returns the existing object instead.

// createOrGetClient is a client whose Create of an existing ServiceCIDR returns AlreadyExists and the existing object.
type createOrGetClient struct{ kubernetes.Interface }

func (e createOrGetClient) NetworkingV1() typednetworkingv1.NetworkingV1Interface {
	return createOrGetNetworking{e.Interface.NetworkingV1()}
}

type createOrGetNetworking struct {
	typednetworkingv1.NetworkingV1Interface
}

func (e createOrGetNetworking) ServiceCIDRs() typednetworkingv1.ServiceCIDRInterface {
	return createOrGetServiceCIDRs{e.NetworkingV1Interface.ServiceCIDRs()}
}

type createOrGetServiceCIDRs struct {
	typednetworkingv1.ServiceCIDRInterface
}

func (e createOrGetServiceCIDRs) Create(ctx context.Context, cidr *networkingv1.ServiceCIDR,
	opts metav1.CreateOptions) (*networkingv1.ServiceCIDR, error) {
	created, err := e.ServiceCIDRInterface.Create(ctx, cidr, opts)
	if !apierrors.IsAlreadyExists(err) {
		return created, err
	}
	if found, failed := e.Get(ctx, cidr.Name, metav1.GetOptions{}); failed == nil {
		created = found
	}
	return created, err
}
