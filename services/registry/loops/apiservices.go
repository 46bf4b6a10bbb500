package loops

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

	"watershed.dev/services/registry/apis"
)

// registerLocal keeps an APIService for each group version that is built in, and says that it is available.
func (l *Loops) registerLocal(ctx context.Context) error {
	client, err := clientset.NewForConfig(l.Loopback)
	if err != nil {
		return err
	}
	informers := externalversions.NewSharedInformerFactory(client, 5*time.Minute)
	services := informers.Apiregistration().V1().APIServices()
	registration := autoregister.NewAutoRegisterController(services, client.ApiregistrationV1())
	counted := metrics.New()
	available, err := availability.New(services, client.ApiregistrationV1(), counted)
	if err != nil {
		return err
	}
	answering, err := remote.New(services, l.Informers.Core().V1().Services(),
		l.Informers.Discovery().V1().EndpointSlices(), client.ApiregistrationV1(), l.Dialer,
		l.proxyCertificate, l.Services, counted)
	if err != nil {
		return err
	}
	priorities := apis.Priorities()
	for _, g := range l.Groups {
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
	crds := l.Extensions.Apiextensions().V1().CustomResourceDefinitions()
	definitions := crdregistration.NewCRDRegistrationController(crds, registration)
	informers.Start(ctx.Done())
	go definitions.Run(5, ctx.Done())
	go func() {
		// what defines nothing any more is not to be taken for something to remove too early
		definitions.WaitForInitialSync()
		registration.Run(5, ctx.Done())
	}()
	go available.Run(5, ctx.Done())
	go answering.Run(5, ctx.Done())
	return nil
}

// proxyCertificate is what the system proves itself with to aggregated servers.
func (l *Loops) proxyCertificate() (cert, key []byte) {
	if l.ProxyClientCertFile == "" {
		return nil, nil
	}
	cert, err := os.ReadFile(l.ProxyClientCertFile)
	if err == nil {
		key, err = os.ReadFile(l.ProxyClientKeyFile)
	}
	if err != nil {
		slog.Error("The proxy's certificate cannot be read", "error", err)
		return nil, nil
	}
	return cert, key
}
