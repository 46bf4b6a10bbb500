package controllers

import (
	"context"

	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	"k8s.io/apiextensions-apiserver/pkg/controller/apiapproval"
	"k8s.io/apiextensions-apiserver/pkg/controller/establish"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	"k8s.io/apiextensions-apiserver/pkg/controller/nonstructuralschema"
	namesstatus "k8s.io/apiextensions-apiserver/pkg/controller/status"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// startCRDControllers starts the controllers that set the conditions of CRDs and that delete the objects of deleted
// CRDs.
func (cs *Controllers) startCRDControllers(ctx context.Context) error {
	client, err := clientset.NewForConfig(cs.Loopback)
	if err != nil {
		return err
	}
	crds := forTerm(ctx, cs.Extensions.Apiextensions().V1().CustomResourceDefinitions())
	establishing := establish.NewEstablishingController(crds, client.ApiextensionsV1())
	served := newServedCRDs(cs.ServedByAll, func(name string) { establishing.QueueCRD(name, 0) })
	_, err = crds.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    served.changed,
		UpdateFunc: func(_, obj any) { served.changed(obj) },
	})
	if err != nil {
		return err
	}
	naming := namesstatus.NewNamingConditionController(klog.FromContext(ctx), crds, client.ApiextensionsV1())
	nonStructural := nonstructuralschema.NewConditionController(crds, client.ApiextensionsV1())
	approval := apiapproval.NewKubernetesAPIApprovalPolicyConformantConditionController(crds, client.ApiextensionsV1())
	finalizing := finalizer.NewCRDFinalizer(crds, client.ApiextensionsV1(), cs.CRClients)
	go naming.RunWithContext(ctx)
	go served.run(ctx)
	go establishing.RunWithContext(ctx)
	go nonStructural.RunWithContext(5, ctx)
	go approval.RunWithContext(5, ctx)
	go finalizing.RunWithContext(5, ctx)
	return nil
}
