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

	"watershed.dev/platform/pki"
)

// XDS finds the replicas of services by an xDS server: endpoints alone (EDS, by aggregated discovery, state of the
// world). How replicas share calls, what is sent again, who they are and whether they are healthy stays with each
// connection, as it does with Addresses; so a call costs the same by either, which it does not by gRPC's own xDS client
// (docs/dependencies.md).
//
// What is known stays good until something better is: while no server answers, when one answers nothing or rubbish, and
// over a start, from a file.
type XDS struct {
	config XDSConfig
	conn   *grpc.ClientConn

	mu       sync.Mutex
	services map[string]*serviceState
	// subscribed has a token when a service is asked for that the stream has not asked for yet.
	subscribed chan struct{}
}

// XDSConfig says where xDS servers are.
type XDSConfig struct {
	// Servers are the addresses of the xDS server's replicas, which are all alike.
	Servers []string
	// Dir keeps what was found, a file for each service; empty: nothing is kept.
	Dir string
	// Node is what this process is called where xDS servers count their clients.
	Node string
	// Fallback are addresses to go by until a server has answered.
	Fallback map[string][]string
}

const (
	// xdsName is the xDS server's name in its certificate.
	xdsName = "xds"
	// endpointType is the only type of resource that is asked for (type.googleapis.com/…).
	endpointType = "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment"
	// maxReplicas is how many replicas of one service are believed.
	maxReplicas = 10_000
	// xdsPause is how long a stream that ended stays down.
	xdsPause = 200 * time.Millisecond
	// xdsTimeout is how long a server may have no answer at all, before the next one is asked.
	xdsTimeout = 3 * time.Second
)

var (
	xdsUpdates = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_xds_updates_total",
		Help: "Sets of replicas that an xDS server sent, by service and result: taken, empty (the last one is kept) or refused.",
	}, []string{"service", "result"})
	xdsConnected = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "watershed_xds_connected",
		Help: "1 while an xDS server that has answered is followed.",
	})
)

// serviceState is what is known of one service's replicas.
type serviceState struct {
	addresses []string
	watchers  map[resolver.ClientConn]bool
}

// NewXDS returns a client of xDS servers, which Run connects.
func NewXDS(id TLS, c XDSConfig) (*XDS, error) {
	conn, err := Dial(id, xdsName, Addresses(c.Servers))
	if err != nil {
		return nil, err
	}
	if c.Dir != "" {
		if err := os.MkdirAll(c.Dir, 0o700); err != nil {
			slog.Error("Replicas are not kept for the next start", "flag", "--xds-cache-dir", "error", err)
			c.Dir = ""
		}
	}
	return &XDS{config: c, conn: conn, services: map[string]*serviceState{}, subscribed: make(chan struct{}, 1)}, nil
}

// Run follows the servers until ctx is done.
func (x *XDS) Run(ctx context.Context) {
	defer x.conn.Close()
	for ctx.Err() == nil {
		err := x.stream(ctx)
		xdsConnected.Set(0)
		if ctx.Err() == nil {
			slog.Warn("The stream of the xDS server ended; replicas stay as they are known", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(xdsPause):
		}
	}
}

// stream asks one server for every service that is dialled, and takes what it answers.
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
				return errors.New("it knows nothing")
			}
			timeout.Reset(xdsTimeout)
		case <-x.subscribed:
		case m := <-responses:
			if len(m.GetResources()) > 0 { // a server that knows nothing may say so
				timeout.Stop()
				xdsConnected.Set(1)
			}
			request.ResponseNonce, request.ErrorDetail = m.GetNonce(), nil
			if err := x.handleResponse(m); err != nil {
				slog.Error("The xDS server's answer is refused in part", "error", err)
				request.ErrorDetail = &rpcstatus.Status{Code: int32(codes.InvalidArgument), Message: err.Error()}
			} else {
				request.VersionInfo = m.GetVersionInfo()
			}
		}
	}
}

// handleResponse keeps what is good of an answer; the error says what is not.
func (x *XDS) handleResponse(m *discovery.DiscoveryResponse) error {
	if m.GetTypeUrl() != endpointType {
		return fmt.Errorf("it is of type %q", m.GetTypeUrl())
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
		case !slices.Contains(x.serviceNames(), service): // a server may send more than it is asked for
		case err != nil:
			xdsUpdates.WithLabelValues(service, "refused").Inc()
			errs = append(errs, fmt.Errorf("%s: %w", service, err))
		case len(addresses) == 0:
			xdsUpdates.WithLabelValues(service, "empty").Inc()
			slog.Warn("No replica is left by the xDS server; the last ones are kept", "of", service)
		default:
			xdsUpdates.WithLabelValues(service, "taken").Inc()
			x.set(service, addresses)
			x.writeCache(service, addresses)
		}
	}
	return errors.Join(errs...)
}

// addressesOf are the endpoints that may be called, sorted.
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

// endpointAddress is where an endpoint is, host:port or a socket.
func endpointAddress(a *core.Address) (string, error) {
	address := Address{Path: a.GetPipe().GetPath()}
	if s := a.GetSocketAddress(); s != nil && s.GetPortValue() <= 65535 {
		address = Address{Host: s.GetAddress(), Port: uint16(s.GetPortValue())}
	}
	if _, err := ParseAddress(address.String()); err != nil {
		return "", fmt.Errorf("an endpoint is no address: %v", a)
	}
	return address.String(), nil
}

// serviceNames are the services that are dialled.
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

// set tells a service's connections of its replicas.
func (x *XDS) set(service string, addresses []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	f := x.services[service]
	if slices.Equal(f.addresses, addresses) {
		return
	}
	slog.Info("Replicas are found", "of", service, "addresses", strings.Join(addresses, " "))
	f.addresses = addresses
	for cc := range f.watchers {
		_ = cc.UpdateState(stateOf(addresses))
	}
}

// writeCache writes a service's replicas down for the next start.
func (x *XDS) writeCache(service string, addresses []string) {
	if x.config.Dir == "" {
		return
	}
	path := filepath.Join(x.config.Dir, service)
	if err := pki.WriteFile(path, []byte(strings.Join(addresses, "\n")+"\n"), 0o600); err != nil {
		slog.Error("Replicas are not kept for the next start", "of", service, "error", err)
	}
}

// readCache are a service's replicas as the last process found them, and as its flags have them: what is not there any more
// is not called, since it does not answer. A file that does not hold addresses counts for nothing.
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

// builder implements Replicas: connections to eds:///service follow x.
func (x *XDS) builder() resolver.Builder { return xdsBuilder{x} }

type xdsBuilder struct{ *XDS }

// Scheme implements resolver.Builder. It is not xds, to which gRPC adds metadata of its own in each call
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
	if len(f.addresses) > 0 { // else calls wait, as long as their contexts let them
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

// ResolveNow implements resolver.Resolver; what changes is sent without asking.
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
