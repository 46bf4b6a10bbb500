// Command cert-manager is cert-manager's controllers for Certificates and for Issuers that sign by themselves or with a
// CA; its own command is in a module that has no versions.
package main

import (
	"context"
	"flag"
	"log"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/cert-manager/cert-manager/pkg/controller"
	"github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	"github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	"github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/selfsigned"
	"github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	"github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	"github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	"github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	"github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	"github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	"github.com/cert-manager/cert-manager/pkg/controller/issuers"

	// the kinds of Issuers
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/selfsigned"
)

// wanted are the controllers, as their packages register them.
var wanted = []string{
	approver.ControllerName, ca.CRControllerName, selfsigned.CRControllerName, issuing.ControllerName,
	keymanager.ControllerName, readiness.ControllerName, requestmanager.ControllerName,
	revisionmanager.ControllerName, trigger.ControllerName, issuers.ControllerName,
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "The cluster.")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer cancel()
	factory, err := controller.NewContextFactory(ctx, controller.ContextOptions{
		Kubeconfig:         *kubeconfig,
		KubernetesAPIQPS:   100,
		KubernetesAPIBurst: 200,
		IssuerOptions: controller.IssuerOptions{
			ClusterResourceNamespace: "kube-system",
		},
		CertificateOptions: controller.CertificateOptions{
			CertificateRequestMinimumBackoffDuration: time.Hour,
			CertificateRequestMaximumBackoffDuration: time.Hour,
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	var all []controller.Interface
	for _, name := range wanted {
		c, err := controller.Known()[name](factory)
		if err != nil {
			log.Fatalf("%s: %v", name, err)
		}
		all = append(all, c)
	}
	base, err := factory.Build()
	if err != nil {
		log.Fatal(err)
	}
	base.SharedInformerFactory.Start(ctx.Done())
	base.KubeSharedInformerFactory.Start(ctx.Done())
	base.HTTP01ResourceMetadataInformersFactory.Start(ctx.Done())
	var running sync.WaitGroup
	for i, c := range all {
		running.Go(func() {
			if err := c.Run(2, ctx); err != nil {
				log.Fatalf("%s: %v", wanted[i], err)
			}
		})
	}
	running.Wait()
}
