package discovery

import (
	"context"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// StartHooks implements registryv1.DiscoveryServer.
func (d *Discovery) StartHooks(context.Context, *registryv1.StartHooksRequest) (*registryv1.StartHooksResponse, error) {
	pending, elected := d.PendingStartHooks()
	return &registryv1.StartHooksResponse{Elected: elected, Pending: pending}, nil
}
