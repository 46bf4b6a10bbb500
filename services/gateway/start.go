package gateway

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/lifecycle"
)

const (
	// probeInterval is the pause before the gateway probes a service again during the start. Each probe also waits for
	// a replica.
	probeInterval = 20 * time.Millisecond
	// fairnessWait is how long a gateway that can serve, but for flow control, stays away from a shared port.
	fairnessWait = 2 * time.Second
)

// requiredChecks are the checks that must succeed once before the gateway is ready. Check and /readyz have them too.
var requiredChecks = []checkName{checkDiscovery, checkEtcd, checkAuthn, checkAuthz, checkAdmission, checkFairness}

// readThroughGateways are the services that read the cluster through a gateway. Their checks fail until a gateway
// serves, so a gateway must serve before these checks succeed.
var readThroughGateways = []checkName{checkAuthn, checkAuthz, checkAdmission}

// Ready returns the gateway's readiness. After the start, etcd is the only reason against it: a gateway that cannot
// reach etcd through registry may have a broken network, and another gateway is better. Later states of the other
// services are on the API's /readyz.
func (g *Service) Ready() *lifecycle.Readiness { return &g.ready }

// Check returns the first required service that does not respond now, or nil.
func (g *Service) Check(ctx context.Context) error {
	for _, name := range requiredChecks {
		if err := g.health[name].get(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

// awaitStart probes each check of the start until it succeeds once, or until ctx ends. A probe waits for a replica.
//
// awaitStart closes joinable after the gateway's own checks have succeeded and each service of readThroughGateways has
// been probed. It waits for flow control for fairnessWait at most, because flow control may wait for the port: its
// controller writes the status of FlowSchemas. Each write waits for admission's plugins, which read the cluster through
// a gateway.
func (g *Service) awaitStart(ctx context.Context) {
	var all, own sync.WaitGroup
	fair := make(chan struct{})
	for _, name := range startChecks() {
		done := func() {}
		switch {
		case name == checkFairness:
			done = func() { close(fair) }
		case slices.Contains(requiredChecks, name):
			own.Add(1)
			done = sync.OnceFunc(own.Done)
		}
		all.Go(func() {
			defer done()
			for ctx.Err() == nil {
				err := g.health[name].getNewer(ctx, 0)
				if slices.Contains(readThroughGateways, name) {
					done()
				}
				if g.ready.Set(string(name), err); err == nil {
					return
				}
				_ = lifecycle.Sleep(ctx, probeInterval)
			}
		})
	}
	own.Wait()
	select {
	case <-fair:
	case <-time.After(fairnessWait):
	}
	close(g.joinable)
	all.Wait()
	if ctx.Err() == nil {
		close(g.started)
	}
	g.followEtcd(ctx)
}

// followEtcd sets readiness by the check of etcd after the start, until ctx ends. The period is checkTTL.
func (g *Service) followEtcd(ctx context.Context) {
	for lifecycle.Sleep(ctx, checkTTL) == nil {
		if err := g.health[checkEtcd].getNewer(ctx, checkTTL); ctx.Err() == nil {
			g.ready.Set(string(checkEtcd), err)
		}
	}
}

// startChecks returns the checks that must succeed once before the gateway is ready: the required checks and the checks
// of the start hooks.
func startChecks() []checkName {
	names := slices.Concat(requiredChecks, []checkName{checkStartHooks}, slices.Collect(maps.Values(startHooks)))
	slices.Sort(names)
	return slices.Compact(names)
}
