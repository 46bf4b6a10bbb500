package flowcontrol

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// renewPeriod is how often a gateway renews its lease with registry: several times before it expires.
const renewPeriod = 10 * time.Second

// peers counts the live gateways.
type peers struct {
	registry registryv1.DiscoveryClient
	name     string
	// counted is set once registry has counted this gateway.
	counted atomic.Bool
}

// run renews the gateway's lease until ctx is done, and then releases it. After each renewal it sends the number of
// live gateways, unless the receiver is busy.
func (p *peers) run(ctx context.Context, counted chan<- int) {
	defer func() {
		leaveCtx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_, _ = p.registry.Gateways(leaveCtx, &registryv1.GatewaysRequest{Name: p.name, Leaving: true})
	}()
	for {
		callCtx, cancel := context.WithTimeout(ctx, renewPeriod)
		resp, err := p.registry.Gateways(callCtx, &registryv1.GatewaysRequest{Name: p.name})
		cancel()
		switch {
		case err == nil:
			p.counted.Store(true)
			select {
			case counted <- max(1, int(resp.Alive)):
			default: // the receiver is busy; the next renewal sends a count
			}
		case ctx.Err() == nil:
			slog.Warn("Failed to count the gateways, flow control keeps its seats", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(renewPeriod):
		}
	}
}
