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

// Metrics are those of the services that run in this process, of what they share, and of the libraries that they are
// made of.
type Metrics struct {
	prometheus.Gatherer
	own *prometheus.Registry
}

// NewMetrics returns what is there before any service is. It is called once in a process.
func NewMetrics() *Metrics {
	m := &Metrics{own: prometheus.NewRegistry()}
	m.own.MustRegister(version.Metrics()...)
	m.own.MustRegister(rpc.Metrics()...)
	m.own.MustRegister(recovery.Metrics()...)
	m.Gatherer = prometheus.Gatherers{m.own, legacyregistry.DefaultGatherer}
	return m
}

// Add adds a service's.
func (m *Metrics) Add(s interface{ Collectors() []prometheus.Collector }) {
	m.own.MustRegister(s.Collectors()...)
}

// Instance is a service that is being built, or has been. Its methods may be called by any number of goroutines.
type Instance struct {
	// Name is the service's.
	Name    string
	service atomic.Pointer[Service]
}

// Set says that the service has been built.
func (b *Instance) Set(s Service) { b.service.Store(&s) }

// Get is the service, or nil while it is being built.
func (b *Instance) Get() Service {
	if s := b.service.Load(); s != nil {
		return *s
	}
	return nil
}

// stopTimeout is how long the service says that it takes to stop; 0 where it does not say.
func (b *Instance) stopTimeout() time.Duration {
	if t, ok := b.Get().(interface{ StopTimeout() time.Duration }); ok {
		return t.StopTimeout()
	}
	return 0
}

// Pages are the service's own pages of the debug address: /healthz (everything that it needs answers), /readyz (it is
// to be called), /files (what is in force of the files that it reads anew), and what it shows of itself.
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

// ready says why the service is not to be called: it has not read what it decides by, or it is on its way out. That
// another service is away is no reason, since no replica would be better.
func (b *Instance) ready(context.Context) error {
	s := b.Get()
	if s == nil {
		return fmt.Errorf("%s is being built; its log says what it waits for", b.Name)
	}
	if err := s.Ready().Err(); err != nil {
		return err
	}
	if p, ok := s.(interface{ Policies() *lifecycle.Readiness }); ok {
		return p.Policies().Err()
	}
	if d, ok := s.(interface{ Draining() bool }); ok && d.Draining() {
		return errors.New("it is told to stop")
	}
	return nil
}

// check says why the service cannot serve.
func (b *Instance) check(ctx context.Context) error {
	s := b.Get()
	if s == nil {
		return fmt.Errorf("%s is being built; its log says what it waits for", b.Name)
	}
	err := s.Ready().Err()
	if c, ok := s.(interface{ Check(context.Context) error }); err == nil && ok {
		err = c.Check(ctx)
	}
	return err
}
