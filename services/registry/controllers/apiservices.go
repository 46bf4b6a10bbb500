package controllers

import (
	"context"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics/legacyregistry"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/apis/apiregistration/v1/helper"
	"k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	"k8s.io/kube-aggregator/pkg/client/informers/externalversions"
	listers "k8s.io/kube-aggregator/pkg/client/listers/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/controllers/autoregister"
	availability "k8s.io/kube-aggregator/pkg/controllers/status/local"
	"k8s.io/kube-aggregator/pkg/controllers/status/metrics"
	"k8s.io/kube-aggregator/pkg/controllers/status/remote"

	"k8s.io/kubernetes/pkg/controlplane/controller/crdregistration"

	"watershed.dev/services/registry/installer"
)

// availabilityMetrics are the metrics of unavailable APIServices, for all terms of this replica.
var (
	availabilityMetrics  = metrics.New()
	registerAvailability = sync.OnceValue(func() error {
		return availabilityMetrics.Register(legacyregistry.Register, legacyregistry.CustomRegister)
	})
)

// registerAPIServices starts the controllers that keep an APIService for each group version, built in or of a CRD. It
// also starts the controllers that set the APIServices' availability.
func (cs *Controllers) registerAPIServices(ctx context.Context, hooks *hooksTerm) error {
	client, err := clientset.NewForConfig(cs.Loopback)
	if err != nil {
		return err
	}
	informers := externalversions.NewSharedInformerFactory(client, 5*time.Minute)
	services := informers.Apiregistration().V1().APIServices()
	registration := autoregister.NewAutoRegisterController(services, client.ApiregistrationV1())
	if err := registerAvailability(); err != nil {
		return err
	}
	localAvailability, err := availability.New(services, client.ApiregistrationV1(), availabilityMetrics)
	if err != nil {
		return err
	}
	remoteAvailability, err := remote.New(services, forTerm(ctx, cs.Informers.Core().V1().Services()),
		forTerm(ctx, cs.Informers.Discovery().V1().EndpointSlices()), client.ApiregistrationV1(), cs.Dialer,
		cs.proxyCertificate, cs.Services, availabilityMetrics)
	if err != nil {
		return err
	}
	var names []string // of the registered APIServices
	priorities := installer.Priorities()
	for _, g := range cs.Groups {
		if g.Name == apiregistrationv1.GroupName { // as in kube-apiserver, this group has no APIService
			continue
		}
		for _, v := range g.Versions {
			p, ok := priorities[schema.GroupVersion{Group: g.Name, Version: v}]
			if !ok {
				continue
			}
			names = append(names, v+"."+g.Name)
			registration.AddAPIServiceToSyncOnStart(&apiregistrationv1.APIService{
				ObjectMeta: metav1.ObjectMeta{Name: v + "." + g.Name},
				Spec: apiregistrationv1.APIServiceSpec{
					Group:                g.Name,
					Version:              v,
					GroupPriorityMinimum: p.Group,
					VersionPriority:      p.Version,
				},
			})
		}
	}
	context.AfterFunc(ctx, func() { // the next leader has the metrics
		ended, _ := services.Lister().List(labels.Everything())
		for _, s := range ended {
			availabilityMetrics.ForgetAPIService(s.Name)
		}
	})
	crds := forTerm(ctx, cs.Extensions.Apiextensions().V1().CustomResourceDefinitions())
	crdRegistration := crdregistration.NewCRDRegistrationController(crds, registration)
	informers.Start(ctx.Done())
	go func() {
		synced := cache.WaitForCacheSync(ctx.Done(), crds.Informer().HasSynced)
		go crdRegistration.Run(5, ctx.Done())
		if synced { // otherwise the term has ended, and Run completes no initial sync
			crdRegistration.WaitForInitialSync()
		}
		// before the initial sync, registration would delete the APIServices of existing CRDs
		registration.Run(5, ctx.Done())
	}()
	go localAvailability.Run(5, ctx.Done())
	go remoteAvailability.Run(5, ctx.Done())
	hooks.done(hookAutoregistration, hookLocalAvailability, hookRemoteAvailability)
	go func() {
		if awaitAvailable(ctx, services.Lister(), names) == nil {
			hooks.done(hookAutoregistered)
		}
	}()
	return nil
}

// availablePeriod is the pause between two reads of awaitAvailable.
const availablePeriod = 50 * time.Millisecond

// awaitAvailable waits until each of the APIServices is available, or until ctx ends.
func awaitAvailable(ctx context.Context, all listers.APIServiceLister, names []string) error {
	return wait.PollUntilContextCancel(ctx, availablePeriod, true, func(context.Context) (bool, error) {
		return !slices.ContainsFunc(names, func(name string) bool {
			s, err := all.Get(name)
			return err != nil || !helper.IsAPIServiceConditionTrue(s, apiregistrationv1.Available)
		}), nil
	})
}

// proxyCertificate reads the client certificate that the registry presents to aggregated servers. It returns nil if
// there is no certificate.
func (cs *Controllers) proxyCertificate() (cert, key []byte) {
	if cs.ProxyClientCertFile == "" {
		return nil, nil
	}
	cert, err := os.ReadFile(cs.ProxyClientCertFile)
	if err == nil {
		key, err = os.ReadFile(cs.ProxyClientKeyFile)
	}
	if err != nil {
		slog.Error("Cannot read the proxy client certificate", "error", err)
		return nil, nil
	}
	return cert, key
}
