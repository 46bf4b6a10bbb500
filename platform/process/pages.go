package process

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/version"
)

// Metrics gathers the metrics of the services in this process, of shared packages, and of the Kubernetes libraries.
type Metrics struct {
	prometheus.Gatherer
	own *prometheus.Registry
}

// NewMetrics returns the metrics that every process has. Call it once per process.
func NewMetrics() *Metrics {
	m := &Metrics{own: prometheus.NewRegistry()}
	m.own.MustRegister(version.Metrics()...)
	m.own.MustRegister(rpc.Metrics()...)
	m.own.MustRegister(recovery.Metrics()...)
	m.Gatherer = prometheus.Gatherers{m.own, legacyregistry.DefaultGatherer}
	return m
}

// Add registers a service's collectors.
func (m *Metrics) Add(s interface{ Collectors() []prometheus.Collector }) {
	m.own.MustRegister(s.Collectors()...)
}

// Instance is a service in a process, before and after it is built. Its methods are safe for concurrent use. /readyz
// reports its state.
//
//	starting --Set--> not ready --Ready has no reason--> ready --Draining--> shutting down
//
// A ready service becomes not ready again when Ready has a reason.
type Instance struct {
	// Name is the service's name.
	Name    string
	service atomic.Pointer[Service]
}

// Set sets the service once it is built.
func (b *Instance) Set(s Service) { b.service.Store(&s) }

// Get returns the service, or nil while it is being built.
func (b *Instance) Get() Service {
	if s := b.service.Load(); s != nil {
		return *s
	}
	return nil
}

// stopTimeout returns how long the service may take to stop; 0: the default.
func (b *Instance) stopTimeout() time.Duration {
	if t, ok := b.Get().(interface{ StopTimeout() time.Duration }); ok {
		return t.StopTimeout()
	}
	return 0
}

// Pages returns the service's pages of the debug address. /healthz is ok if the service and its dependencies respond,
// and /readyz if clients may call the service. /files has the active content of reloaded files. The other pages are
// the service's own.
func (b *Instance) Pages() map[string]http.Handler {
	page := func(check func(context.Context) error) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := check(r.Context()); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprint(w, "ok")
		})
	}
	return map[string]http.Handler{
		"/healthz": page(b.check),
		"/readyz":  page(b.ready),
		"/files": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if f, ok := b.Get().(interface{ Files() http.Handler }); ok {
				f.Files().ServeHTTP(w, r)
			}
		}),
		"/": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if h, ok := b.Get().(http.Handler); ok {
				h.ServeHTTP(w, r)
				return
			}
			http.NotFound(w, r)
		}),
	}
}

// ready returns why clients should not call the service: its policy has not been read, or it is shutting down. A
// dependency that is away is no reason, because no other replica would be better.
func (b *Instance) ready(context.Context) error {
	s := b.Get()
	if s == nil {
		return fmt.Errorf("%s is starting; see its log", b.Name)
	}
	if err := s.Ready().Err(); err != nil {
		return err
	}
	if p, ok := s.(interface{ Policies() *lifecycle.Readiness }); ok {
		return p.Policies().Err()
	}
	if d, ok := s.(interface{ Draining() bool }); ok && d.Draining() {
		return errors.New("it is shutting down")
	}
	return nil
}

// check returns why the service cannot serve.
func (b *Instance) check(ctx context.Context) error {
	s := b.Get()
	if s == nil {
		return fmt.Errorf("%s is starting; see its log", b.Name)
	}
	err := s.Ready().Err()
	if c, ok := s.(interface{ Check(context.Context) error }); err == nil && ok {
		err = c.Check(ctx)
	}
	return err
}
