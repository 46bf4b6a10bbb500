package rpc

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
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
	"google.golang.org/grpc/connectivity"
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
	id     TLS
	config XDSConfig

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
	// xdsTimeout bounds the wait for the first endpoints on a stream. After it, XDS connects to the next server.
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
	if len(c.Servers) == 0 {
		return nil, errors.New("no address for service " + xdsName)
	}
	if _, err := id.ClientConfig(xdsName); err != nil {
		return nil, err
	}
	if c.Dir != "" {
		if err := os.MkdirAll(c.Dir, 0o700); err != nil {
			slog.Error("Endpoints are not cached for the next start", "flag", "--xds-cache-dir", "error", err)
			c.Dir = ""
		}
	}
	return &XDS{id: id, config: c, services: map[string]*serviceState{}, subscribed: make(chan struct{}, 1)}, nil
}

// Metrics returns the collectors of the client. A process without a client has none of them, because it would report a
// lost connection.
func (*XDS) Metrics() []prometheus.Collector { return []prometheus.Collector{xdsUpdates, xdsConnected} }

// Run receives endpoints until ctx is done. Each stream has a connection of its own: the first to a random server, the
// others to the next server. The address of a load balancer may so reach another replica.
func (x *XDS) Run(ctx context.Context) { x.runStreams(ctx, x.stream) }

// runStreams calls stream for the servers in rotation until ctx is done. Its delays grow until a stream has received
// endpoints. It logs the first error of each server and each different error, because an outage may last.
func (x *XDS) runStreams(ctx context.Context, stream func(ctx context.Context, server string) (bool, error)) {
	servers := x.config.Servers
	backoff, logged := xdsBackoff, map[string]string{}
	for n := rand.IntN(len(servers)); ctx.Err() == nil; n++ {
		server := servers[n%len(servers)]
		received, err := stream(ctx, server)
		xdsConnected.Set(0)
		if ctx.Err() != nil {
			return
		}
		if received {
			backoff = xdsBackoff
			clear(logged)
		}
		if text := err.Error(); logged[server] != text {
			slog.Warn("The xDS stream ended; the previous endpoints stay", "server", server, "error", err)
			logged[server] = text
		}
		_ = lifecycle.Sleep(ctx, backoff.Step())
	}
}

// stream opens a stream to a server, and receives endpoints until the stream fails. It fails at once if the server
// cannot be reached or does not serve. It reports whether the server sent endpoints.
func (x *XDS) stream(ctx context.Context, server string) (received bool, err error) {
	conn, err := Dial(x.id, xdsName, Addresses{server})
	if err != nil {
		return false, err
	}
	defer conn.Close()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stream, err := discovery.NewAggregatedDiscoveryServiceClient(conn).
		StreamAggregatedResources(ctx, grpc.WaitForReady(false))
	if err != nil {
		return false, err
	}
	go cancelUnhealthy(ctx, cancel, conn)
	return x.receive(ctx, cancel, stream)
}

// receive subscribes to all dialed services, and applies responses until the stream fails. cancel cancels the stream
// and ctx.
func (x *XDS) receive(ctx context.Context, cancel context.CancelCauseFunc,
	stream discovery.AggregatedDiscoveryService_StreamAggregatedResourcesClient) (received bool, err error) {
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
				ended <- ctx.Err()
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
				cancel(err) // the goroutine may wait to send a response to this goroutine
				return received, errors.Join(err, <-ended)
			}
		}
		select {
		case err := <-ended:
			return received, cmp.Or(context.Cause(ctx), err)
		case <-timeout.C:
			if len(request.ResourceNames) > 0 {
				return false, errors.New("the server has no endpoints")
			}
			timeout.Reset(xdsTimeout)
		case <-x.subscribed:
		case m := <-responses:
			if len(m.GetResources()) > 0 { // a server without endpoints may send an empty response
				timeout.Stop()
				received = true
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

// cancelUnhealthy cancels ctx when the server of conn reports that it no longer serves (gRPC health). gRPC would
// continue its open streams.
func cancelUnhealthy(ctx context.Context, cancel context.CancelCauseFunc, conn *grpc.ClientConn) {
	for state := conn.GetState(); state != connectivity.TransientFailure; state = conn.GetState() {
		if !conn.WaitForStateChange(ctx, state) {
			return
		}
	}
	cancel(errors.New("the server does not serve any longer"))
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
