package discovery

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

const (
	// GatewaysPrefix is the prefix of the own keys with the live gateways' names. Each key has a lease, and its value
	// is the gateway's address. They are not API objects, because any user with write access to the objects could
	// change the count and so every gateway's share of seats.
	GatewaysPrefix = "gateways/"
	// ReportsPrefix is the prefix of the own keys with the live gateways' reports: for each name, a GatewaysRequest
	// with establishing only. A key has the lease of the gateway's other key.
	ReportsPrefix = "establishing/"
	// processesPrefix is the prefix of the own keys with the reports of the live gateways' processes: for each name, a
	// GatewayReport. A key has the lease of the gateway's other keys.
	processesPrefix = "processes/"
	// maxProcessReport bounds the report of a gateway's process in bytes.
	maxProcessReport = 64 << 10
	// gatewayTTL is how many seconds a gateway counts after its last call.
	gatewayTTL = 35
)

// Endpoints are the endpoints of the kubernetes Service. Its methods are safe for concurrent use.
type Endpoints interface {
	// Address returns the address that stands for a gateway's address. It is "" if the address cannot be an endpoint.
	Address(gateway string) string
	// Renew keeps an address among the endpoints, and Remove removes it.
	Renew(address string) error
	Remove(address string) error
}

// Gateways implements registryv1.DiscoveryServer: it registers or removes a gateway, its address and its report, and
// returns the number of live gateways.
func (d *Discovery) Gateways(ctx context.Context, r *registryv1.GatewaysRequest) (*registryv1.GatewaysResponse, error) {
	if r.Name == "" {
		return nil, status.Error(codes.InvalidArgument, "the name of the gateway is missing")
	}
	store := d.resources.Storage
	etcd, prefix, reportKey := store.Client.Client, store.OwnKey(GatewaysPrefix), store.OwnKey(ReportsPrefix)+r.Name
	report, err := proto.Marshal(&registryv1.GatewaysRequest{Establishing: r.Establishing})
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	if r.Report { // the key exists only if the gateway counts
		if _, err = etcd.Put(ctx, reportKey, string(report), clientv3.WithIgnoreLease()); err != nil {
			return nil, status.Error(codes.Unavailable, err.Error())
		}
		return &registryv1.GatewaysResponse{}, nil
	}
	if len(r.Process) > maxProcessReport {
		r.Process = nil // the gateway counts without its report
	}
	processKey := store.OwnKey(processesPrefix) + r.Name
	process, err := proto.Marshal(&registryv1.GatewayReport{
		Report:            r.Process,
		ReceivedUnixNanos: time.Now().UnixNano(),
	})
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	address, value := "", ""
	if d.Endpoints != nil {
		address = d.Endpoints.Address(r.AdvertiseAddress)
	}
	if r.Accepting {
		value = address
	}
	if r.Leaving {
		d.withoutLease.update(prefix+r.Name, false, time.Now())
		_, err = etcd.Txn(ctx).Then(clientv3.OpDelete(prefix+r.Name), clientv3.OpDelete(reportKey),
			clientv3.OpDelete(processKey)).Commit()
	} else {
		var lease *clientv3.LeaseGrantResponse
		if lease, err = etcd.Grant(ctx, gatewayTTL); err == nil {
			_, err = etcd.Txn(ctx).Then(clientv3.OpPut(prefix+r.Name, value, clientv3.WithLease(lease.ID)),
				clientv3.OpPut(reportKey, string(report), clientv3.WithLease(lease.ID)),
				clientv3.OpPut(processKey, string(process), clientv3.WithLease(lease.ID))).Commit()
		}
	}
	live, lerr := etcd.Get(ctx, prefix, clientv3.WithPrefix())
	if lerr == nil && errors.Is(err, rpctypes.ErrNoSpace) {
		return d.keepGateway(ctx, etcd, prefix+r.Name, live.Kvs)
	}
	if err := errors.Join(err, lerr); err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	if address != "" {
		d.updateEndpoints(address, live.Kvs)
	}
	return &registryv1.GatewaysResponse{Alive: int32(live.Count)}, nil
}

// keepGateway counts a gateway while etcd has no space. etcd still keeps leases alive. Only this registry counts the
// gateways without a lease. Endpoints do not change.
func (d *Discovery) keepGateway(ctx context.Context, etcd *clientv3.Client, key string,
	live []*mvccpb.KeyValue) (*registryv1.GatewaysResponse, error) {
	i := slices.IndexFunc(live, func(kv *mvccpb.KeyValue) bool { return string(kv.Key) == key })
	if i >= 0 {
		ctx, cancel := context.WithTimeout(ctx, time.Second) // KeepAliveOnce retries without a pause
		defer cancel()
		if _, err := etcd.KeepAliveOnce(ctx, clientv3.LeaseID(live[i].Lease)); err != nil {
			return nil, status.Error(codes.Unavailable, err.Error())
		}
	}
	return &registryv1.GatewaysResponse{Alive: int32(len(live) + d.withoutLease.update(key, i < 0, time.Now()))}, nil
}

// gatewaysWithoutLease has the last calls of gateways that have no lease. It is safe for concurrent use.
type gatewaysWithoutLease struct {
	mu   sync.Mutex
	last map[string]time.Time
}

// update records the call of a gateway with or without a lease. It returns the number of gateways without a lease of
// the last gatewayTTL.
func (g *gatewaysWithoutLease) update(key string, withoutLease bool, now time.Time) int {
	g.mu.Lock()
	defer g.mu.Unlock()
	maps.DeleteFunc(g.last, func(other string, last time.Time) bool {
		return other == key || now.Sub(last) > gatewayTTL*time.Second
	})
	if withoutLease {
		if g.last == nil {
			g.last = map[string]time.Time{}
		}
		g.last[key] = now
	}
	return len(g.last)
}

// GatewayReports implements registryv1.DiscoveryServer.
func (d *Discovery) GatewayReports(ctx context.Context,
	_ *registryv1.GatewayReportsRequest) (*registryv1.GatewayReportsResponse, error) {
	store := d.resources.Storage
	stored, err := store.Client.Client.Get(ctx, store.OwnKey(processesPrefix), clientv3.WithPrefix())
	if err != nil {
		return nil, status.Error(codes.Unavailable, err.Error())
	}
	resp := &registryv1.GatewayReportsResponse{}
	for _, kv := range stored.Kvs {
		report := &registryv1.GatewayReport{}
		if err := proto.Unmarshal(kv.Value, report); err == nil {
			resp.Reports = append(resp.Reports, report)
		}
	}
	return resp, nil
}

// updateEndpoints renews an address if a live gateway accepts connections at it. Otherwise it removes the address.
func (d *Discovery) updateEndpoints(address string, live []*mvccpb.KeyValue) {
	update := d.Endpoints.Remove
	if slices.ContainsFunc(live, func(kv *mvccpb.KeyValue) bool { return string(kv.Value) == address }) {
		update = d.Endpoints.Renew
	}
	if err := update(address); err != nil {
		slog.Warn("Cannot update the endpoints of the kubernetes Service", "address", address, "error", err)
	}
}
