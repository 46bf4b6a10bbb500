package discovery

import (
	"context"
	"errors"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// gatewaysPrefix is the prefix of the own keys with the live gateways' names. Each key has a lease. They are not
	// API objects, because any user with write access to the objects could change the count and so every gateway's
	// share of seats.
	gatewaysPrefix = "gateways/"
	// gatewayTTL is how many seconds a gateway counts after its last call.
	gatewayTTL = 35
)

// Gateways implements registryv1.DiscoveryServer: it registers or removes a gateway and returns the number of live
// gateways.
func (d *Discovery) Gateways(ctx context.Context, r *registryv1.GatewaysRequest) (*registryv1.GatewaysResponse, error) {
	if r.Name == "" {
		return nil, status.Error(codes.InvalidArgument, "the name of the gateway is missing")
	}
	etcd, prefix := d.resources.Storage.Client.Client, d.resources.Storage.OwnKey(gatewaysPrefix)
	var err error
	if r.Leaving {
		_, err = etcd.Delete(ctx, prefix+r.Name)
	} else {
		var lease *clientv3.LeaseGrantResponse
		if lease, err = etcd.Grant(ctx, gatewayTTL); err == nil {
			_, err = etcd.Put(ctx, prefix+r.Name, "", clientv3.WithLease(lease.ID))
		}
	}
	alive, cerr := etcd.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	if err := errors.Join(err, cerr); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	return &registryv1.GatewaysResponse{Alive: int32(alive.Count)}, nil
}
