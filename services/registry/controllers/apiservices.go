package controllers

import (
	"context"
	"log/slog"
	"os"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	"k8s.io/kube-aggregator/pkg/client/informers/externalversions"
	"k8s.io/kube-aggregator/pkg/controllers/autoregister"
	availability "k8s.io/kube-aggregator/pkg/controllers/status/local"
	"k8s.io/kube-aggregator/pkg/controllers/status/metrics"
	"k8s.io/kube-aggregator/pkg/controllers/status/remote"

	"k8s.io/kubernetes/pkg/controlplane/controller/crdregistration"

	"watershed.dev/services/registry/installer"
)

// registerAPIServices keeps an APIService for each group version that is built in, and says that it is available.
func (cs *Controllers) registerAPIServices(ctx context.Context) error {
	client, err := clientset.NewForConfig(cs.Loopback)
	if err != nil {
		return err
	}
	informers := externalversions.NewSharedInformerFactory(client, 5*time.Minute)
	services := informers.Apiregistration().V1().APIServices()
	registration := autoregister.NewAutoRegisterController(services, client.ApiregistrationV1())
	availabilityMetrics := metrics.New()
	localAvailability, err := availability.New(services, client.ApiregistrationV1(), availabilityMetrics)
	if err != nil {
		return err
	}
	remoteAvailability, err := remote.New(services, cs.Informers.Core().V1().Services(),
		cs.Informers.Discovery().V1().EndpointSlices(), client.ApiregistrationV1(), cs.Dialer,
		cs.proxyCertificate, cs.Services, availabilityMetrics)
	if err != nil {
		return err
	}
	priorities := installer.Priorities()
	for _, g := range cs.Groups {
		if g.Name == apiregistrationv1.GroupName { // the registration's own group is nobody's to register
			continue
		}
		for _, v := range g.Versions {
			p, ok := priorities[schema.GroupVersion{Group: g.Name, Version: v}]
			if !ok {
				continue
			}
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
	crds := cs.Extensions.Apiextensions().V1().CustomResourceDefinitions()
	crdRegistration := crdregistration.NewCRDRegistrationController(crds, registration)
	informers.Start(ctx.Done())
	go crdRegistration.Run(5, ctx.Done())
	go func() {
		// what defines nothing any more is not to be taken for something to remove too early
		crdRegistration.WaitForInitialSync()
		registration.Run(5, ctx.Done())
	}()
	go localAvailability.Run(5, ctx.Done())
	go remoteAvailability.Run(5, ctx.Done())
	return nil
}

// proxyCertificate is what the system proves itself with to aggregated servers.
func (cs *Controllers) proxyCertificate() (cert, key []byte) {
	if cs.ProxyClientCertFile == "" {
		return nil, nil
	}
	cert, err := os.ReadFile(cs.ProxyClientCertFile)
	if err == nil {
		key, err = os.ReadFile(cs.ProxyClientKeyFile)
	}
	if err != nil {
		slog.Error("The proxy's certificate cannot be read", "error", err)
		return nil, nil
	}
	return cert, key
}
