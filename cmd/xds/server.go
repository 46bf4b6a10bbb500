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
	// Zone is where it runs; empty: not known.
	Zone string `json:"zone,omitempty"`
}

// server answers xDS with what it has been told of each service's replicas. A cache for each type of resource, behind
// a mux: gRPC's clients ask by name, and are answered when one of those names changes. (A snapshot cache holds answers
// back until everything in a snapshot is asked for: go-control-plane issue 426.)
type server struct {
	caches    map[string]*cache.LinearCache
	ready     lifecycle.Readiness
	stateFile string

	// firstUpdate is closed when the replicas of any service are known.
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
			Help: "Answers that a client refused (NACK). It goes on by what it had.",
		}),
		replicaCount: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "watershed_xds_replicas",
			Help: "Replicas that are told, by service.",
		}, []string{"service"}),
		empties: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_xds_empty_total",
			Help: "How often a source named no replica of a service; the last ones are told on.",
		}, []string{"service"}),
		clients: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "watershed_xds_clients",
			Help: "Streams of clients.",
		}),
	}
	for _, t := range []string{resource.ListenerType, resource.RouteType, resource.ClusterType, resource.EndpointType} {
		s.caches[t] = cache.NewLinearCache(t)
	}
	s.loadState()
	return s
}

// register offers the server's stream, for as long as ctx lasts.
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
				slog.Error("A client refuses what it is sent", "client", r.GetNode().GetId(), "type", r.GetTypeUrl(),
					"why", d.GetMessage())
			}
			return nil
		},
	}))
}

// waitFor has the server not ready until a service's replicas are known.
func (s *server) waitFor(service string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.replicas[service]) == 0 {
		s.ready.Set(service, errors.New("no replica is known"))
	}
}

// set tells a service's replicas. None at all is what a source says that has lost its own, as often as not: the last
// ones are told on, and whoever calls one that is gone finds out.
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
		slog.Error("Replicas are not told", "of", service, "error", err)
		return
	}
	s.replicas[service] = replicas
	s.saveState()
}

// publish puts a service's resources into the caches; its endpoints come first, since what refers to them comes later.
func (s *server) publish(service string, replicas []Replica) error {
	all := resourcesOf(service, replicas)
	for _, t := range []string{resource.EndpointType, resource.ClusterType, resource.RouteType, resource.ListenerType} {
		if t != resource.EndpointType && len(s.replicas[service]) > 0 {
			break // nothing but its endpoints ever changes
		}
		if err := s.caches[t].UpdateResource(service, all[t]); err != nil {
			return err
		}
	}
	s.replicaCount.WithLabelValues(service).Set(float64(len(replicas)))
	s.ready.Set(service, nil)
	s.once.Do(func() { close(s.firstUpdate) })
	slog.Info("Replicas are told", "of", service, "number", len(replicas))
	return nil
}

// saveState writes down what is known, for the next start.
func (s *server) saveState() {
	if s.stateFile == "" {
		return
	}
	data, err := json.MarshalIndent(s.replicas, "", "  ")
	if err == nil {
		err = pki.WriteFile(s.stateFile, append(data, '\n'), 0o600)
	}
	if err != nil {
		slog.Error("What is known is not kept for the next start", "file", s.stateFile, "error", err)
	}
}

// loadState tells what the process before this one knew.
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
		slog.Error("What was known is not all restored", "file", s.stateFile, "error", err)
	}
}

// checkAll says which replica has no address.
func checkAll(all []Replica) (err error) {
	for _, r := range all {
		_, rerr := rpc.ParseAddress(r.Address)
		err = errors.Join(err, rerr)
	}
	return err
}

// Register, Collectors, Ready and Run are process.Service's.
func (s *server) Register(grpc.ServiceRegistrar) {}
func (s *server) Ready() *lifecycle.Readiness    { return &s.ready }
func (s *server) Run(ctx context.Context) error  { <-ctx.Done(); return ctx.Err() }
func (s *server) Collectors() []prometheus.Collector {
	return []prometheus.Collector{s.refused, s.replicaCount, s.empties, s.clients}
}

// ServeHTTP shows what is told, as JSON.
func (s *server) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	_ = e.Encode(s.replicas)
}
