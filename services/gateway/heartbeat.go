package gateway

import (
	"context"
	"crypto/rand"
	"log/slog"
	"time"

	"watershed.dev/platform/watchable"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// heartbeatPeriod is how often a gateway calls registry. It is below the lifetimes of the gateway's leases in etcd.
	heartbeatPeriod = 10 * time.Second
	// heartbeatTimeout bounds a call.
	heartbeatTimeout = 3 * time.Second
	// heartbeatRetry is the pause after a failed call.
	heartbeatRetry = time.Second
)

// heartbeat reports to registry that the gateway is live, and the address at which it accepts connections.
//
//	live --accepting--> an endpoint of the kubernetes Service --draining--> live --> left
type heartbeat struct {
	registry registryv1.DiscoveryClient
	name     string
	// address is the gateway's IP address; empty if unknown.
	address string
	// accepting is closed when the gateway is ready for the first time, and draining when it shuts down.
	accepting, draining <-chan struct{}
	// live is the number of live gateways; 0 until registry has counted this gateway.
	live watchable.Value[int]
}

func newHeartbeat(registry registryv1.DiscoveryClient, address string, accepting,
	draining <-chan struct{}) *heartbeat {
	return &heartbeat{registry: registry, name: rand.Text(), address: address, accepting: accepting, draining: draining}
}

// run calls registry until ctx is done, and then leaves.
func (h *heartbeat) run(ctx context.Context) {
	defer func() {
		leaveCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), heartbeatTimeout)
		defer cancel()
		_, _ = h.registry.Gateways(leaveCtx,
			&registryv1.GatewaysRequest{Name: h.name, AdvertiseAddress: h.address, Leaving: true})
	}()
	accepting, draining, accepts := h.accepting, h.draining, false
	for {
		// not canceled with ctx: registry would have stored that there is no address, and not have removed the endpoint
		callCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), heartbeatTimeout)
		resp, err := h.registry.Gateways(callCtx, &registryv1.GatewaysRequest{Name: h.name,
			AdvertiseAddress: h.address, Accepting: accepts})
		cancel()
		pause := heartbeatPeriod
		if err == nil {
			live := max(1, int(resp.Alive))
			h.live.Update(func(before int) (int, bool) { return live, live != before })
		} else if ctx.Err() == nil {
			slog.Warn("Registry does not count this gateway", "error", err)
			pause = heartbeatRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-accepting:
			accepts, accepting = true, nil
		case <-draining:
			accepts, draining, accepting = false, nil, nil
		case <-time.After(pause):
		}
	}
}

// counted reports whether registry has counted this gateway.
func (h *heartbeat) counted() bool {
	live, _ := h.live.Get()
	return live > 0
}
