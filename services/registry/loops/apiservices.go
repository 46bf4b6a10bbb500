package loops

import (
	"context"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	"k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	"k8s.io/kube-aggregator/pkg/client/informers/externalversions"
	"k8s.io/kube-aggregator/pkg/controllers/autoregister"
	availability "k8s.io/kube-aggregator/pkg/controllers/status/local"
	"k8s.io/kube-aggregator/pkg/controllers/status/metrics"

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
	available, err := availability.New(services, client.ApiregistrationV1(), metrics.New())
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
			registration.AddAPIServiceToSyncOnStart(&apiregistrationv1.APIService{ObjectMeta: metav1.ObjectMeta{Name: v + "." + g.Name},
				Spec: apiregistrationv1.APIServiceSpec{Group: g.Name, Version: v, GroupPriorityMinimum: p.Group, VersionPriority: p.Version}})
		}
	}
	informers.Start(ctx.Done())
	go registration.Run(5, ctx.Done())
	go available.Run(5, ctx.Done())
	return nil
}
