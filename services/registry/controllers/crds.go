package controllers

import (
	"context"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apihelpers"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/client/clientset/clientset"
	"k8s.io/apiextensions-apiserver/pkg/controller/apiapproval"
	"k8s.io/apiextensions-apiserver/pkg/controller/establish"
	"k8s.io/apiextensions-apiserver/pkg/controller/finalizer"
	"k8s.io/apiextensions-apiserver/pkg/controller/nonstructuralschema"
	namesstatus "k8s.io/apiextensions-apiserver/pkg/controller/status"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// establishAfter is the delay between accepted names and Established. The CRD is served in between, so that every
// gateway has it before a client relies on it. kube-apiserver has no delay for a single server, and 5 s for several
// servers.
const establishAfter = 100 * time.Millisecond

// startCRDControllers starts the controllers that set the conditions of CRDs and that delete the objects of deleted
// CRDs.
func (cs *Controllers) startCRDControllers(ctx context.Context) error {
	client, err := clientset.NewForConfig(cs.Loopback)
	if err != nil {
		return err
	}
	crds := cs.Extensions.Apiextensions().V1().CustomResourceDefinitions()
	establishing := establish.NewEstablishingController(crds, client.ApiextensionsV1())
	handler, err := crds.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(obj any) { establishSoon(establishing, obj) },
		UpdateFunc: func(_, obj any) { establishSoon(establishing, obj) },
	})
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { _ = crds.Informer().RemoveEventHandler(handler) })
	naming := namesstatus.NewNamingConditionController(klog.FromContext(ctx), crds, client.ApiextensionsV1())
	nonStructural := nonstructuralschema.NewConditionController(crds, client.ApiextensionsV1())
	approval := apiapproval.NewKubernetesAPIApprovalPolicyConformantConditionController(crds, client.ApiextensionsV1())
	finalizing := finalizer.NewCRDFinalizer(crds, client.ApiextensionsV1(), cs.CRClients)
	go naming.RunWithContext(ctx)
	go establishing.RunWithContext(ctx)
	go nonStructural.RunWithContext(5, ctx)
	go approval.RunWithContext(5, ctx)
	go finalizing.RunWithContext(5, ctx)
	return nil
}

func establishSoon(c *establish.EstablishingController, obj any) {
	d, ok := obj.(*apiextensionsv1.CustomResourceDefinition)
	if ok && apihelpers.IsCRDConditionTrue(d, apiextensionsv1.NamesAccepted) &&
		!apihelpers.IsCRDConditionTrue(d, apiextensionsv1.Established) {
		c.QueueCRD(d.Name, establishAfter)
	}
}
