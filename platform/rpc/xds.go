package rpc

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/prometheus/client_golang/prometheus"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/pki"
)

// XDS finds the replicas of services through an xDS server. It uses only endpoints (EDS, aggregated, state of the
// world). Balancing, retries, identities and health checks belong to each connection, as with Addresses. Calls
// therefore cost the same with both, unlike with gRPC's own xDS client (docs/contributors/dependencies.md).
//
// The endpoints of a service stay until the server sends valid endpoints.
//
//	none ----cache file or fallback----> provisional
//	  |                                      |
//	  +--accepted response--> current <------+
//	                             |
//	                             +--rejected or empty response, lost stream, no server--> current
//
// An accepted response replaces the endpoints and the cache file.
type XDS struct {
	config XDSConfig
	conn   *grpc.ClientConn

	mu       sync.Mutex
	services map[string]*serviceState
	// subscribed has a token when a service was added and the stream has not subscribed to it.
	subscribed chan struct{}
}

// XDSConfig configures an XDS.
type XDSConfig struct {
	// Servers are the addresses of the xDS server's replicas. All replicas send the same endpoints.
	Servers []string
	// Dir caches the endpoints for the next start, in a file per service. Empty: no cache.
	Dir string
	// Node is the ID of this process in requests. xDS servers count their clients by it.
	Node string
	// Fallback has addresses for each service until a server has responded.
	Fallback map[string][]string
}

const (
	// xdsName is the xDS server's name in its certificate.
	xdsName = "xds"
	// endpointType is the only resource type that XDS requests (type.googleapis.com/…).
	endpointType = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
	// maxReplicas bounds the endpoints of a service.
	maxReplicas = 10_000
	// xdsPause is the delay before a lost stream is opened again.
	xdsPause = 200 * time.Millisecond
	// xdsTimeout bounds the wait for the first endpoints on a stream. After it, XDS opens a stream to the next server.
	xdsTimeout = 3 * time.Second
)

var (
	xdsUpdates = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_xds_updates_total",
		Help: "Endpoint sets that an xDS server sent, by service and result: accepted, empty (the previous set " +
			"stays) or rejected.",
	}, []string{"service", "result"})
	xdsConnected = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_xds_connected",
		Help: "1 while connected to an xDS server that has sent endpoints. Only processes with --xds-servers have it.",
	})
)

// serviceState holds a service's endpoints and the connections that use them.
type serviceState struct {
	addresses []string
	watchers  map[resolver.ClientConn]bool
}

// NewXDS returns a client of xDS servers. Run connects it.
func NewXDS(id TLS, c XDSConfig) (*XDS, error) {
	conn, err := Dial(id, xdsName, Addresses(c.Servers))
	if err != nil {
		return nil, err
	}
	if c.Dir != "" {
		if err := os.MkdirAll(c.Dir, 0o700); err != nil {
			slog.Error("Endpoints are not cached for the next start", "flag", "--xds-cache-dir", "error", err)
			c.Dir = ""
		}
	}
	return &XDS{config: c, conn: conn, services: map[string]*serviceState{}, subscribed: make(chan struct{}, 1)}, nil
}

// Metrics returns the collectors of the client. A process without a client has none of them, because it would report a
// lost connection.
func (*XDS) Metrics() []prometheus.Collector { return []prometheus.Collector{xdsUpdates, xdsConnected} }

// Run receives endpoints until ctx is done.
func (x *XDS) Run(ctx context.Context) {
	defer x.conn.Close()
	for ctx.Err() == nil {
		err := x.stream(ctx)
		xdsConnected.Set(0)
		if ctx.Err() == nil {
			slog.Warn("The xDS stream ended; the previous endpoints stay", "error", err)
		}
		_ = lifecycle.Sleep(ctx, xdsPause)
	}
}

// stream opens a stream, subscribes to all dialed services, and applies responses until the stream fails.
func (x *XDS) stream(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(x.conn).StreamAggregatedResources(ctx)
	if err != nil {
		return err
	}
	responses, ended := make(chan *discovery.DiscoveryResponse), make(chan error, 1)
	go func() {
		for {
			m, err := stream.Recv()
			if err != nil {
				ended <- err
				return
			}
			select {
			case responses <- m:
			case <-ctx.Done():
				return
			}
		}
	}()
	timeout := time.NewTimer(xdsTimeout)
	defer timeout.Stop()
	request := &discovery.DiscoveryRequest{Node: &core.Node{Id: x.config.Node}, TypeUrl: endpointType}
	for {
		request.ResourceNames = x.serviceNames()
		if len(request.ResourceNames) > 0 {
			if err := stream.Send(proto.CloneOf(request)); err != nil {
				return errors.Join(err, <-ended)
			}
		}
		select {
		case err := <-ended:
			return err
		case <-timeout.C:
			if len(request.ResourceNames) > 0 {
				return errors.New("the server has no endpoints")
			}
			timeout.Reset(xdsTimeout)
		case <-x.subscribed:
		case m := <-responses:
			if len(m.GetResources()) > 0 { // a server without endpoints may send an empty response
				timeout.Stop()
				xdsConnected.Set(1)
			}
			request.ResponseNonce, request.ErrorDetail = m.GetNonce(), nil
			if err := x.handleResponse(m); err != nil {
				slog.Error("A response of the xDS server was rejected in part", "error", err)
				request.ErrorDetail = &rpcstatus.Status{Code: int32(codes.InvalidArgument), Message: err.Error()}
			} else {
				request.VersionInfo = m.GetVersionInfo()
			}
		}
	}
}

// handleResponse applies the valid endpoint sets of a response. The error describes the invalid sets.
func (x *XDS) handleResponse(m *discovery.DiscoveryResponse) error {
	if m.GetTypeUrl() != endpointType {
		return fmt.Errorf("unexpected resource type %q", m.GetTypeUrl())
	}
	var errs []error
	for _, r := range m.GetResources() {
		a := &endpoint.ClusterLoadAssignment{}
		if err := r.UnmarshalTo(a); err != nil {
			errs = append(errs, err)
			continue
		}
		addresses, err := addressesOf(a)
		switch service := a.GetClusterName(); {
		case !slices.Contains(x.serviceNames(), service): // a server may send other services too
		case err != nil:
			xdsUpdates.WithLabelValues(service, "rejected").Inc()
			errs = append(errs, fmt.Errorf("%s: %w", service, err))
		case len(addresses) == 0:
			xdsUpdates.WithLabelValues(service, "empty").Inc()
			slog.Warn("The xDS server sent no endpoints; the previous endpoints stay", "peer", service)
		default:
			xdsUpdates.WithLabelValues(service, "accepted").Inc()
			x.set(service, addresses)
			x.writeCache(service, addresses)
		}
	}
	return errors.Join(errs...)
}

// addressesOf returns the endpoints with the health HEALTHY or UNKNOWN, sorted.
func addressesOf(a *endpoint.ClusterLoadAssignment) ([]string, error) {
	var addresses []string
	for _, l := range a.GetEndpoints() {
		for _, e := range l.GetLbEndpoints() {
			switch e.GetHealthStatus() {
			case core.HealthStatus_UNKNOWN, core.HealthStatus_HEALTHY:
			default:
				continue
			}
			address, err := endpointAddress(e.GetEndpoint().GetAddress())
			if err != nil {
				return nil, err
			}
			addresses = append(addresses, address)
		}
	}
	if len(addresses) > maxReplicas {
		return nil, fmt.Errorf("%d endpoints are more than %d", len(addresses), maxReplicas)
	}
	slices.Sort(addresses)
	return slices.Compact(addresses), nil
}

// endpointAddress returns the address of an endpoint: host:port or a socket.
func endpointAddress(a *core.Address) (string, error) {
	address := Address{Path: a.GetPipe().GetPath()}
	if s := a.GetSocketAddress(); s != nil && s.GetPortValue() <= 65535 {
		address = Address{Host: s.GetAddress(), Port: uint16(s.GetPortValue())}
	}
	if _, err := ParseAddress(address.String()); err != nil {
		return "", fmt.Errorf("an endpoint has no valid address: %v", a)
	}
	return address.String(), nil
}

// serviceNames returns the dialed services, sorted.
func (x *XDS) serviceNames() []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	var services []string
	for name, f := range x.services {
		if len(f.watchers) > 0 {
			services = append(services, name)
		}
	}
	slices.Sort(services)
	return services
}

// set sends a service's endpoints to its connections.
func (x *XDS) set(service string, addresses []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f := x.services[service]
	if slices.Equal(f.addresses, addresses) {
		return
	}
	slog.Info("Received endpoints", "peer", service, "addresses", strings.Join(addresses, " "))
	f.addresses = addresses
	for cc := range f.watchers {
		_ = cc.UpdateState(stateOf(addresses))
	}
}

// writeCache saves a service's endpoints for the next start.
func (x *XDS) writeCache(service string, addresses []string) {
	if x.config.Dir == "" {
		return
	}
	path := filepath.Join(x.config.Dir, service)
	if err := pki.WriteFile(path, []byte(strings.Join(addresses, "\n")+"\n"), 0o600); err != nil {
		slog.Error("Endpoints are not cached for the next start", "peer", service, "error", err)
	}
}

// readCache returns a service's endpoints from the cache file and from Fallback. It ignores a file with an invalid
// address. A stale endpoint does no harm, because a connection to it fails.
func (x *XDS) readCache(service string) []string {
	addresses := slices.Clone(x.config.Fallback[service])
	if x.config.Dir != "" {
		data, err := os.ReadFile(filepath.Join(x.config.Dir, service))
		cached := strings.Fields(string(data))
		for _, a := range cached {
			_, perr := ParseAddress(a)
			err = errors.Join(err, perr)
		}
		if err == nil {
			addresses = append(addresses, cached...)
		}
	}
	slices.Sort(addresses)
	return slices.Compact(addresses)
}

// AddressesOf implements Replicas. It returns no addresses for a service without connections.
func (x *XDS) AddressesOf(service string) []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	if f := x.services[service]; f != nil {
		return f.addresses
	}
	return nil
}

// builder implements Replicas. Connections to eds:///service receive x's endpoints.
func (x *XDS) builder() resolver.Builder { return xdsBuilder{x} }

type xdsBuilder struct{ *XDS }

// Scheme implements resolver.Builder. The scheme is not xds, because gRPC would then add metadata to each call
// (internal.GRPCResolverSchemeExtraMetadata): 4 allocations.
func (xdsBuilder) Scheme() string { return "eds" }

// Build implements resolver.Builder.
func (b xdsBuilder) Build(t resolver.Target, cc resolver.ClientConn,
	_ resolver.BuildOptions) (resolver.Resolver, error) {
	service := t.Endpoint()
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.services[service]
	if f == nil {
		f = &serviceState{addresses: b.readCache(service), watchers: map[resolver.ClientConn]bool{}}
		b.services[service] = f
	}
	f.watchers[cc] = true
	if len(f.addresses) > 0 { // without endpoints, calls wait until their deadlines
		_ = cc.UpdateState(stateOf(f.addresses))
	}
	select {
	case b.subscribed <- struct{}{}:
	default:
	}
	return &xdsResolver{b.XDS, service, cc}, nil
}

type xdsResolver struct {
	*XDS
	service string
	cc      resolver.ClientConn
}

// ResolveNow implements resolver.Resolver. It does nothing, because the server pushes changes.
func (*xdsResolver) ResolveNow(resolver.ResolveNowOptions) {}

// Close implements resolver.Resolver.
func (r *xdsResolver) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.services[r.service].watchers, r.cc)
}

func stateOf(addresses []string) resolver.State {
	var s resolver.State
	for _, a := range addresses {
		s.Addresses = append(s.Addresses, resolver.Address{Addr: a})
	}
	return s
}
