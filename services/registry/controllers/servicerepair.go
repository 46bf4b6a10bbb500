package controllers

import (
	"context"
	"errors"
	"sync"
	"time"

	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/kubernetes"
	ipallocator "k8s.io/kubernetes/pkg/registry/core/service/ipallocator/controller"
	portallocator "k8s.io/kubernetes/pkg/registry/core/service/portallocator/controller"

	"watershed.dev/services/registry/installer"
)

// firstRepairTimeout bounds the first repair, as in upstream's hook.
const firstRepairTimeout = time.Minute

// repairServices starts upstream's repair loops of Service addresses and node ports, until the context ends. It returns
// after their first success. Upstream's hook of this name (k8s.io/kubernetes/pkg/registry/core/rest) runs loops that
// the process has built once, and which cannot run again after the end of a term.
func (cs *Controllers) repairServices(c genericapiserver.PostStartHookContext) error {
	record, err := cs.APIs.NodePorts(cs.Storage)
	if err != nil {
		return err
	}
	addresses := cs.addressRepair(c, cs.Client)
	ports := portallocator.NewRepair(installer.RepairInterval, cs.Client.CoreV1(), cs.Client.EventsV1(),
		cs.APIs.ServiceNodePortRange, record)
	stop := make(chan struct{})
	context.AfterFunc(c, func() { close(stop) })
	var loops sync.WaitGroup
	repaired := make(chan struct{}, 2)
	for _, run := range []func(func(), chan struct{}){addresses.RunUntil, ports.RunUntil} {
		loops.Go(func() { run(func() { repaired <- struct{}{} }, stop) })
	}
	go func() {
		loops.Wait()
		record.Destroy()
	}()
	timeout := time.After(firstRepairTimeout)
	for range cap(repaired) {
		select {
		case <-repaired:
		case <-c.Done():
			return c.Err()
		case <-timeout:
			return errors.New("unable to perform initial IP and Port allocation check")
		}
	}
	return nil
}

// addressRepair returns the repair loop of Service addresses for the term of ctx.
func (cs *Controllers) addressRepair(ctx context.Context, client kubernetes.Interface) *ipallocator.RepairIPAddress {
	networking := cs.Informers.Networking().V1()
	return ipallocator.NewRepairIPAddress(installer.RepairInterval, client,
		forTerm(ctx, cs.Informers.Core().V1().Services()), forTerm(ctx, networking.ServiceCIDRs()),
		forTerm(ctx, networking.IPAddresses()))
}
