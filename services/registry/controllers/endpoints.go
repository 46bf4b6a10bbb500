package controllers

import (
	"net"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apistorage "k8s.io/apiserver/pkg/storage"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/apis/core/validation"
	"k8s.io/kubernetes/pkg/controlplane/reconcilers"

	"watershed.dev/services/registry/storage"
)

const (
	kubernetesServiceName = "kubernetes"
	// endpointTTL is how long an endpoint lasts after its last renewal, as in kube-apiserver.
	endpointTTL = 15 * time.Second
	// MasterLeases is the prefix of the keys of API servers' addresses, below --etcd-prefix.
	MasterLeases = "masterleases/"
)

// Endpoints are the endpoints of the kubernetes Service: the address of each live gateway, and of each kube-apiserver
// on the same etcd. Both keep addresses in the same leases. The methods are safe for concurrent use.
type Endpoints struct {
	// fixed is the address of every gateway, such as their load balancer's; nil: each gateway has an address.
	fixed    net.IP
	ports    []corev1.EndpointPort
	leases   reconcilers.Leases
	adapter  reconcilers.EndpointsAdapter
	services corelisters.ServiceLister
	// counted is the reconciler of --endpoint-reconciler-type=master-count, which uses no leases; nil: leases.
	counted reconcilers.EndpointReconciler
}

// newEndpoints returns the endpoints at a port.
func newEndpoints(fixed net.IP, o *Options, s *storage.Storage, client kubernetes.Interface,
	services corelisters.ServiceLister) (*Endpoints, error) {
	config, err := s.Factory.NewConfig(api.Resource("apiServerIPInfo"), &api.Endpoints{})
	if err != nil {
		return nil, err
	}
	leases, err := reconcilers.NewLeases(config, "/"+MasterLeases, endpointTTL)
	if err != nil {
		return nil, err
	}
	e := &Endpoints{
		fixed:    fixed,
		ports:    []corev1.EndpointPort{{Name: "https", Protocol: corev1.ProtocolTCP, Port: int32(o.SecurePort)}},
		leases:   leases,
		adapter:  reconcilers.NewEndpointsAdapter(client.CoreV1(), client.DiscoveryV1()),
		services: services,
	}
	if reconcilers.Type(o.EndpointReconciler) == reconcilers.MasterCountReconcilerType {
		e.counted = reconcilers.NewMasterCountEndpointReconciler(o.APIServerCount, e.adapter)
	}
	return e, nil
}

// Address returns --advertise-address if the flag is set, or the gateway's address. It is empty if the validation of
// Endpoints rejects the address: every server would fail to write the endpoints.
func (e *Endpoints) Address(gateway string) string {
	if gateway != "" && e.fixed != nil {
		gateway = e.fixed.String()
	}
	if len(validation.ValidateEndpointIP(gateway, nil)) > 0 {
		return ""
	}
	return gateway
}

// Renew keeps an address among the endpoints for endpointTTL. Before the Service exists, it only renews the lease.
// Without leases, the address stays until Remove, or until there are more than --apiserver-count.
func (e *Endpoints) Renew(address string) error {
	if e.counted != nil {
		return e.counted.ReconcileEndpoints(kubernetesServiceName, net.ParseIP(address), e.ports, false)
	}
	if _, err := e.services.Services(metav1.NamespaceDefault).Get(kubernetesServiceName); apierrors.IsNotFound(err) {
		return e.leases.UpdateLease(address)
	}
	return reconcilers.NewLeaseEndpointReconciler(e.adapter, e.leases).ReconcileEndpoints(
		kubernetesServiceName, net.ParseIP(address), e.ports, false)
}

// Remove removes an address from the endpoints, also if it is the last.
func (e *Endpoints) Remove(address string) error {
	if e.counted != nil {
		return e.counted.RemoveEndpoints(kubernetesServiceName, net.ParseIP(address), e.ports)
	}
	r := reconcilers.NewLeaseEndpointReconciler(e.adapter, e.leases)
	r.StopReconciling() // otherwise it keeps the last address
	err := r.RemoveEndpoints(kubernetesServiceName, net.ParseIP(address), e.ports)
	if apistorage.IsNotFound(err) { // the lease has ended
		return nil
	}
	return err
}

// reconciler returns the reconciler of the elected registry, which drops the addresses whose leases have ended. It has
// no address of its own. If e is nil or has no leases, it does nothing.
func (e *Endpoints) reconciler() reconcilers.EndpointReconciler {
	if e == nil || e.counted != nil {
		return reconcilers.NewNoneEndpointReconciler()
	}
	return reconcilers.NewLeaseEndpointReconciler(e.adapter, readOnlyLeases{e.leases})
}

// readOnlyLeases are leases that their gateways renew.
type readOnlyLeases struct{ reconcilers.Leases }

// UpdateLease implements reconcilers.Leases.
func (readOnlyLeases) UpdateLease(string) error { return nil }

// RemoveLease implements reconcilers.Leases: there is no address to remove.
func (readOnlyLeases) RemoveLease(string) error {
	return apistorage.NewKeyNotFoundError(MasterLeases, 0)
}
