package process

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/component-base/metrics/legacyregistry"

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

// Add registers collectors. Several services of a process may have the same collector of a shared package.
func (m *Metrics) Add(collectors []prometheus.Collector) {
	for _, c := range collectors {
		registered := prometheus.AlreadyRegisteredError{}
		if err := m.own.Register(c); err != nil && (!errors.As(err, &registered) || registered.ExistingCollector != c) {
			panic(err)
		}
	}
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
	// starting is why the service is not built yet, if it is known.
	starting atomic.Pointer[error]
}

// Set sets the service once it is built.
func (b *Instance) Set(s *Service) { b.service.Store(s) }

// Get returns the service, or nil while it is being built.
func (b *Instance) Get() *Service { return b.service.Load() }

// Pages returns the pages of the debug address for the services of a process. /healthz is ok if every service and its
// dependencies respond, and /readyz if clients may call every service. /files has the active content of reloaded files.
// "/" is the status page of a service.
func Pages(all ...*Instance) map[string]http.Handler {
	page := func(check func(*Instance, context.Context) error) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, b := range all {
				if err := check(b, r.Context()); err != nil {
					http.Error(w, err.Error(), http.StatusServiceUnavailable)
					return
				}
			}
			fmt.Fprint(w, "ok")
		})
	}
	return map[string]http.Handler{
		"/healthz": page((*Instance).check),
		"/readyz":  page((*Instance).ready),
		"/files": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, b := range all {
				if s := b.Get(); s != nil && s.Files != nil {
					s.Files.ServeHTTP(w, r)
				}
			}
		}),
		"/": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			for _, b := range all {
				if s := b.Get(); s != nil && s.Status != nil {
					s.Status.ServeHTTP(w, r)
					return
				}
			}
			http.NotFound(w, r)
		}),
	}
}

// ready returns why clients should not call the service: it has a reason of its own (Ready), its policy has not been
// read, or it is shutting down.
func (b *Instance) ready(context.Context) error {
	s := b.Get()
	switch {
	case s == nil:
		return b.notBuilt()
	case s.Ready.Err() != nil:
		return s.Ready.Err()
	case s.Policies != nil && s.Policies.Err() != nil:
		return s.Policies.Err()
	case s.Draining != nil && s.Draining():
		return errors.New("it is shutting down")
	}
	return nil
}

// check returns why the service cannot serve.
func (b *Instance) check(ctx context.Context) error {
	s := b.Get()
	if s == nil {
		return b.notBuilt()
	}
	err := s.Ready.Err()
	if err == nil && s.Check != nil {
		err = s.Check(ctx)
	}
	return err
}

func (b *Instance) notBuilt() error {
	if reason := b.starting.Load(); reason != nil {
		return fmt.Errorf("%s is starting: %w", b.Name, *reason)
	}
	return fmt.Errorf("%s is starting; see its log", b.Name)
}
