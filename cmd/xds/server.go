package xds

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"sync"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	xdsserver "github.com/envoyproxy/go-control-plane/pkg/server/v3"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
)

// Replica is one process of a service.
type Replica struct {
	// Address is host:port or a socket (rpc.ParseAddress).
	Address string `json:"address"`
	// Zone is the zone that the replica runs in. Empty: unknown.
	Zone string `json:"zone,omitempty"`
}

// server serves the replicas of each service by xDS. It has a cache for each type of resource, behind a mux. gRPC
// clients request resources by name, and receive a response when one of their resources changes. A snapshot cache would
// delay responses until a client has requested everything in the snapshot (go-control-plane issue 426).
type server struct {
	caches    map[string]*cache.LinearCache
	ready     lifecycle.Readiness
	stateFile string

	// firstUpdate is closed when the replicas of a first service are known.
	firstUpdate chan struct{}
	once        sync.Once

	mu       sync.Mutex
	replicas map[string][]Replica

	refused      prometheus.Counter
	replicaCount *prometheus.GaugeVec
	empties      *prometheus.CounterVec
	clients      prometheus.Gauge
}

func newServer(stateFile string) *server {
	s := &server{
		caches:      map[string]*cache.LinearCache{},
		stateFile:   stateFile,
		firstUpdate: make(chan struct{}),
		replicas:    map[string][]Replica{},
		refused: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "watershed_xds_refused_total",
			Help: "Responses that a client rejected (NACK). The client keeps its previous state.",
		}),
		replicaCount: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "watershed_xds_replicas",
			Help: "Published replicas, by service.",
		}, []string{"service"}),
		empties: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_xds_empty_total",
			Help: "Updates of a source with no replica of a service; the previous replicas stay published.",
		}, []string{"service"}),
		clients: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "watershed_xds_clients",
			Help: "Open streams of clients.",
		}),
	}
	for _, t := range []string{resource.ListenerType, resource.RouteType, resource.ClusterType, resource.EndpointType} {
		s.caches[t] = cache.NewLinearCache(t)
	}
	s.loadState()
	return s
}

// register registers the ADS service on r, until ctx is done.
func (s *server) register(ctx context.Context, r grpc.ServiceRegistrar) {
	mux := &cache.MuxCache{
		Classify:      func(r *cache.Request) string { return r.GetTypeUrl() },
		ClassifyDelta: func(r *cache.DeltaRequest) string { return r.GetTypeUrl() },
		Caches:        map[string]cache.Cache{},
	}
	for t, c := range s.caches {
		mux.Caches[t] = c
	}
	discovery.RegisterAggregatedDiscoveryServiceServer(r, xdsserver.NewServer(ctx, mux, xdsserver.CallbackFuncs{
		StreamOpenFunc:   func(context.Context, int64, string) error { s.clients.Inc(); return nil },
		StreamClosedFunc: func(int64, *core.Node) { s.clients.Dec() },
		StreamRequestFunc: func(_ int64, r *discovery.DiscoveryRequest) error {
			if d := r.GetErrorDetail(); d != nil {
				s.refused.Inc()
				slog.Error("A client rejected a response", "client", r.GetNode().GetId(), "type", r.GetTypeUrl(),
					"reason", d.GetMessage())
			}
			return nil
		},
	}))
}

// waitFor keeps the server not ready until the replicas of a service are known.
func (s *server) waitFor(service string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.empties.WithLabelValues(service) // Prometheus' increase() ignores the first value of a series
	if len(s.replicas[service]) == 0 {
		s.ready.Set(service, errors.New("its replicas are not known yet"))
	}
}

// set publishes the replicas of a service. It ignores an empty list, because a source that lost its data also reports
// an empty list. The previous replicas stay published, and clients find out which of them are gone.
func (s *server) set(service string, replicas []Replica) {
	slices.SortFunc(replicas, func(a, b Replica) int {
		return cmp.Or(cmp.Compare(a.Address, b.Address), cmp.Compare(a.Zone, b.Zone))
	})
	replicas = slices.CompactFunc(replicas, func(a, b Replica) bool { return a.Address == b.Address })
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(replicas) == 0 {
		s.empties.WithLabelValues(service).Inc()
		return
	}
	if slices.Equal(s.replicas[service], replicas) {
		return
	}
	if err := s.publish(service, replicas); err != nil {
		slog.Error("Replicas are not published", "peer", service, "error", err)
		return
	}
	s.replicas[service] = replicas
	s.saveState()
}

// publish puts a service's resources into the caches. It begins with the endpoints, because later resources refer to
// them.
func (s *server) publish(service string, replicas []Replica) error {
	all := resourcesOf(service, replicas)
	for _, t := range []string{resource.EndpointType, resource.ClusterType, resource.RouteType, resource.ListenerType} {
		if t != resource.EndpointType && len(s.replicas[service]) > 0 {
			break // only the endpoints ever change
		}
		if err := s.caches[t].UpdateResource(service, all[t]); err != nil {
			return err
		}
	}
	s.replicaCount.WithLabelValues(service).Set(float64(len(replicas)))
	s.empties.WithLabelValues(service)
	s.ready.Set(service, nil)
	s.once.Do(func() { close(s.firstUpdate) })
	slog.Info("Published replicas", "peer", service, "number", len(replicas))
	return nil
}

// saveState writes the replicas to the state file, for the next start.
func (s *server) saveState() {
	if s.stateFile == "" {
		return
	}
	data, err := json.MarshalIndent(s.replicas, "", "  ")
	if err == nil {
		err = pki.WriteFile(s.stateFile, append(data, '\n'), 0o600)
	}
	if err != nil {
		slog.Error("The state is not saved for the next start", "file", s.stateFile, "error", err)
	}
}

// loadState publishes the replicas that the previous process saved.
func (s *server) loadState() {
	if s.stateFile == "" {
		return
	}
	data, err := os.ReadFile(s.stateFile)
	if errors.Is(err, os.ErrNotExist) {
		return
	}
	var known map[string][]Replica
	if err == nil {
		err = json.Unmarshal(data, &known)
	}
	for service, replicas := range known {
		if perr := checkAll(replicas); perr != nil {
			err = errors.Join(err, perr)
			continue
		}
		if len(replicas) > 0 {
			err = errors.Join(err, s.publish(service, replicas))
			s.replicas[service] = replicas
		}
	}
	if err != nil {
		slog.Error("The saved state is not completely restored", "file", s.stateFile, "error", err)
	}
}

// checkAll returns the errors of all invalid addresses.
func checkAll(all []Replica) (err error) {
	for _, r := range all {
		_, rerr := rpc.ParseAddress(r.Address)
		err = errors.Join(err, rerr)
	}
	return err
}

func (s *server) collectors() []prometheus.Collector {
	return []prometheus.Collector{s.refused, s.replicaCount, s.empties, s.clients}
}

// ServeHTTP serves the published replicas as JSON.
func (s *server) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(s.replicas)
}
