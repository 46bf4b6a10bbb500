package process

import (
	"context"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/guard"
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
	m.own.MustRegister(guard.Metrics()...)
	m.Gatherer = prometheus.Gatherers{m.own, legacyregistry.DefaultGatherer}
	return m
}

// Add adds a service's.
func (m *Metrics) Add(s interface{ Collectors() []prometheus.Collector }) {
	m.own.MustRegister(s.Collectors()...)
}

// Built is a service that is being built, or has been. Its methods may be called by any number of goroutines.
type Built struct {
	// Name is the service's.
	Name    string
	service atomic.Pointer[Service]
}

// Set says that the service has been built.
func (b *Built) Set(s Service) { b.service.Store(&s) }

// Get is the service, or nil while it is being built.
func (b *Built) Get() Service {
	if s := b.service.Load(); s != nil {
		return *s
	}
	return nil
}

// stopTimeout is how long the service says that it takes to stop; 0 where it does not say.
func (b *Built) stopTimeout() time.Duration {
	if t, ok := b.Get().(interface{ StopTimeout() time.Duration }); ok {
		return t.StopTimeout()
	}
	return 0
}

// Pages are the service's own pages of the debug address: /healthz, and what it shows of itself.
func (b *Built) Pages() map[string]http.Handler {
	return map[string]http.Handler{
		"/healthz": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if err := b.check(r.Context()); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
			fmt.Fprint(w, "ok")
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

// check says why the service cannot serve.
func (b *Built) check(ctx context.Context) error {
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
