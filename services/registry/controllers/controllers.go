// Package controllers runs the controllers that are part of kube-apiserver. The controllers are upstream's. They
// maintain:
//
//   - the system namespaces, bootstrap RBAC, priority classes and flow-control defaults.
//   - the kubernetes Service, its endpoints and the addresses of Services.
//   - the conditions of CRDs and the APIServices.
//   - the published authentication configuration.
//   - the leaders among LeaseCandidates, with the feature gate CoordinatedLeaderElection.
//
// A single registry runs them at a time, elected through etcd. If a full etcd grants no lease, every registry runs
// them, as every kube-apiserver does. Each controller has its own goroutines, which end with the context of Run. Every
// registry keeps its gateways' addresses among the endpoints of the kubernetes Service, and renews its identity lease.
//
// # Review notes
//
//   - Run must start the ServiceCIDR controller first, and kubernetesService after hookServiceRepair and
//     awaitAllocators. Otherwise the kubernetes Service appears 10 s later.
//   - registration must wait for the CRDs. Otherwise it deletes the APIServices of existing CRDs.
//   - The value of ElectionKey must not change. Replicas of two releases share it during a rolling upgrade.
package controllers

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	extensions "k8s.io/apiextensions-apiserver/pkg/client/informers/externalversions"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	restclient "k8s.io/client-go/rest"
	"k8s.io/client-go/transport"
	aggregator "k8s.io/kube-aggregator/pkg/apiserver"
	"k8s.io/kubernetes/pkg/controlplane/apiserver/options"
	"k8s.io/kubernetes/pkg/controlplane/controller/defaultservicecidr"
	"k8s.io/kubernetes/pkg/controlplane/controller/kubernetesservice"
	"k8s.io/kubernetes/pkg/controlplane/controller/legacytokentracking"
	"k8s.io/kubernetes/pkg/controlplane/controller/systemnamespaces"
	"k8s.io/kubernetes/pkg/controlplane/reconcilers"

	"watershed.dev/platform/lifecycle"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/installer"
	"watershed.dev/services/registry/storage"
)

// ElectionKey is the name of the own key by which registries elect the registry that runs the controllers.
const ElectionKey = "controllers"

// identityName is the label value of kube-apiserver's identity leases.
const identityName = "kube-apiserver"

// notManaged is the --advertise-address of a registry that does not manage the kubernetes Service.
const notManaged = "none"

// Controllers runs upstream's controllers on the elected registry.
type Controllers struct {
	Options
	Client    *kubernetes.Clientset
	Loopback  *restclient.Config
	Informers informers.SharedInformerFactory
	Hooks     []installer.PostStartHook
	Groups    []*registryv1.Group
	Storage   *storage.Storage
	APIs      *installer.Options
	Identity  string
	// Extensions has the informer of CRDs. CRClients deletes the objects of a CRD.
	Extensions extensions.SharedInformerFactory
	CRClients  finalizer.CRClientGetter
	// ServedByAll returns the CRDs that every live gateway serves and that are not established, by name, with the
	// lowest of the gateways' revisions.
	ServedByAll func(context.Context) (map[string]int64, error)
	// Services resolves the addresses of aggregated servers.
	Services aggregator.ServiceResolver
	// Dialer dials aggregated servers. nil means a direct connection.
	Dialer *transport.DialHolder
	// StartHooks is the progress of Run.
	StartHooks *StartHooks

	// endpoints are the endpoints of the kubernetes Service; nil: they are not managed.
	endpoints *Endpoints
	trust     *trust
}

// Prepare registers the informers that the controllers read, and reads the certificate authorities. It must run before
// the informers start. It returns the endpoints of the kubernetes Service, or nil if they are not managed.
func (cs *Controllers) Prepare() (*Endpoints, error) {
	var err error
	if cs.trust, err = cs.readTrust(); err != nil {
		return nil, err
	}
	cs.Informers.Core().V1().Namespaces().Informer()
	cs.Informers.Core().V1().Services().Informer()
	cs.Informers.Discovery().V1().EndpointSlices().Informer()
	if cs.AdvertiseAddress == notManaged ||
		reconcilers.Type(cs.EndpointReconciler) == reconcilers.NoneEndpointReconcilerType {
		return nil, nil
	}
	fixed := net.ParseIP(cs.AdvertiseAddress)
	if cs.AdvertiseAddress != "" && fixed == nil {
		return nil, fmt.Errorf("--advertise-address %q: neither an IP address nor none", cs.AdvertiseAddress)
	}
	cs.endpoints, err = newEndpoints(fixed, &cs.Options, cs.Storage, cs.Client,
		cs.Informers.Core().V1().Services().Lister())
	return cs.endpoints, err
}

// Run runs every controller until ctx ends, or until a start hook fails.
func (cs *Controllers) Run(ctx context.Context) error {
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	hooks := cs.StartHooks.begin(ctx, cs.hookNames())
	if !cs.waitSynced(ctx) {
		return ctx.Err()
	}
	primary, secondary, err := cs.APIs.ServiceIPRanges()
	if err != nil {
		return err
	}
	// Addresses of Services can be allocated once the default ServiceCIDR exists.
	defaultservicecidr.NewController(primary, secondary, createOrGetClient{cs.Client}).Start(ctx)
	hooks.done(hookServiceCIDR)
	go systemnamespaces.NewController([]string{metav1.NamespaceSystem, metav1.NamespacePublic,
		corev1.NamespaceNodeLease, metav1.NamespaceDefault}, cs.Client,
		cs.Informers.Core().V1().Namespaces()).Run(ctx.Done())
	hooks.done(hookSystemNamespaces)
	cs.startHooks(ctx, append(slices.Clone(cs.Hooks), installer.PostStartHook{
		Name: hookServiceRepair,
		Run:  cs.repairServices,
	}), hooks, fail)
	cs.trust.publish(ctx, cs.Client)
	hooks.done(hookAuthenticationInfo)
	if err := cs.registerAPIServices(ctx, hooks); err != nil {
		return err
	}
	if err := cs.startCRDControllers(ctx); err != nil {
		return err
	}
	hooks.done(hookCRDs)
	go legacytokentracking.NewController(cs.Client).RunWithContext(ctx)
	hooks.done(hookLegacyTokens)
	if HasIdentityLease() {
		go cs.collectIdentityLeases(ctx)
		hooks.done(hookIdentityLease, hookIdentityLeaseGC)
	}
	if hasCoordinatedElection() {
		go func() {
			cs.electCandidates(ctx)
			hooks.done(hookCoordinatedElection)
		}()
	}
	hooks.wait(ctx, hookServiceRepair, repairTimeout) // the kubernetes Service should not be created during it
	cs.awaitAllocators(ctx)
	if err := cs.kubernetesService(ctx, primary); err != nil {
		return err
	}
	hooks.done(hookKubernetesService)
	<-ctx.Done()
	return context.Cause(ctx)
}

func (cs *Controllers) waitSynced(ctx context.Context) bool {
	for _, ok := range cs.Informers.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return false
		}
	}
	return true
}

// allocatorsTimeout bounds awaitAllocators. The range of addresses may be full, or of another family than the default
// ServiceCIDR.
const allocatorsTimeout = 10 * time.Second

// awaitAllocators waits until a Service can get an address, if the kubernetes Service does not exist. Otherwise its
// create would fail, and the controller would retry 10 s later.
func (cs *Controllers) awaitAllocators(ctx context.Context) {
	services := cs.Informers.Core().V1().Services().Lister().Services(metav1.NamespaceDefault)
	if _, err := services.Get("kubernetes"); err == nil || cs.AdvertiseAddress == notManaged {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, allocatorsTimeout)
	defer cancel()
	probe := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "address-probe-"},
		Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 443}}},
	}
	for {
		_, err := cs.Client.CoreV1().Services(metav1.NamespaceDefault).Create(ctx, probe,
			metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err == nil || ctx.Err() != nil {
			return
		}
		slog.Debug("Addresses of Services cannot be allocated yet", "error", err)
		_ = lifecycle.Sleep(ctx, 50*time.Millisecond)
	}
}

// kubernetesService starts the controller of default/kubernetes, if the Service is managed.
func (cs *Controllers) kubernetesService(ctx context.Context, ipRange net.IPNet) error {
	if cs.AdvertiseAddress == notManaged {
		return nil
	}
	_, serviceIP, err := options.ServiceIPRange(ipRange)
	if err != nil {
		return err
	}
	c := kubernetesservice.New(kubernetesservice.Config{
		EndpointReconciler: cs.endpoints.reconciler(),
		EndpointInterval:   10 * time.Second,
		ServiceIP:          serviceIP,
		ServicePort:        443,
		PublicServicePort:  cs.SecurePort,

		KubernetesServiceNodePort: cs.ServiceNodePort,
	}, cs.Client,
		cs.Informers.Core().V1().Services())
	c.Start(ctx.Done())
	return nil
}
