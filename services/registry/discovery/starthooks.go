package discovery

import (
	"context"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// StartHooks implements registryv1.DiscoveryServer.
func (d *Discovery) StartHooks(ctx context.Context,
	_ *registryv1.StartHooksRequest) (*registryv1.StartHooksResponse, error) {
	pending, known, err := d.PendingStartHooks(ctx)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	return &registryv1.StartHooksResponse{Known: known, Pending: pending}, nil
}
