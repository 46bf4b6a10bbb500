package flowcontrol

import (
	"context"
	"log/slog"
	"time"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// renewPeriod is how often a gateway says that it lives: several times within what registry counts it for.
const renewPeriod = 10 * time.Second

// peers counts the gateways that live.
type peers struct {
	registry registryv1.DiscoveryClient
	name     string
}

// run says that this gateway lives until ctx is done, and tells how many do whenever it has been told and somebody
// listens.
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
			select {
			case counted <- max(1, int(resp.Alive)):
			default: // it is still being seen to; it is counted again soon
			}
		case ctx.Err() == nil:
			slog.Warn("The gateways are not counted; the seats of flow control stay as they are", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(renewPeriod):
		}
	}
}
