package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/config"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/kubeversion"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/admission"
	"watershed.dev/services/authn"
	"watershed.dev/services/authz"
	"watershed.dev/services/gateway"
	"watershed.dev/services/registry"
	"watershed.dev/services/watchfanout"
)

// service is what every service is to the command that runs it.
type service interface {
	Register(grpc.ServiceRegistrar)
	Collectors() []prometheus.Collector
	Ready(context.Context) error
	Run(context.Context) error
}

// definition is how a service is configured and built.
type definition struct {
	// serves: it offers RPCs. Who may call them is in rpc.Callers.
	serves bool
	// calls are the services that it calls.
	calls []string
	// new returns the flags' adder and the builder that uses what they were set to.
	new func() (addFlags func(*pflag.FlagSet), build func(context.Context, *wiring) (service, error))
}

// wiring is what a service is built with.
type wiring struct {
	id rpc.TLS
	// client connects to another service.
	client func(service string, p rpc.Policy) (grpc.ClientConnInterface, error)
	// log overrides the connection to NATS, for the embedded one.
	log func(*eventlog.Options)
}

var services = map[string]*definition{
	"registry": {serves: true, new: func() (func(*pflag.FlagSet), func(context.Context, *wiring) (service, error)) {
		c := registry.NewConfig()
		return c.AddFlags, func(ctx context.Context, w *wiring) (service, error) {
			w.log(&c.Log)
			return registry.New(ctx, c, w.id)
		}
	}},
	"watchfanout": {serves: true, calls: []string{"registry"}, new: func() (func(*pflag.FlagSet), func(context.Context, *wiring) (service, error)) {
		c := &watchfanout.Config{}
		return c.AddFlags, func(_ context.Context, w *wiring) (service, error) {
			w.log(&c.Log)
			conn, err := w.client("registry", rpc.Policy{Idempotent: true})
			if err != nil {
				return nil, err
			}
			return watchfanout.New(c, registryv1.NewSourceClient(conn), w.id)
		}
	}},
	"authn": {serves: true, new: func() (func(*pflag.FlagSet), func(context.Context, *wiring) (service, error)) {
		c := authn.NewConfig()
		return c.AddFlags, func(ctx context.Context, _ *wiring) (service, error) { return authn.New(ctx, c) }
	}},
	"authz": {serves: true, new: func() (func(*pflag.FlagSet), func(context.Context, *wiring) (service, error)) {
		c := authz.NewConfig()
		return c.AddFlags, func(ctx context.Context, _ *wiring) (service, error) { return authz.New(ctx, c) }
	}},
	"admission": {serves: true, new: func() (func(*pflag.FlagSet), func(context.Context, *wiring) (service, error)) {
		c := admission.NewConfig()
		return c.AddFlags, func(ctx context.Context, _ *wiring) (service, error) { return admission.New(ctx, c) }
	}},
	"gateway": {calls: []string{"authn", "authz", "admission", "registry", "watchfanout"}, new: func() (func(*pflag.FlagSet), func(context.Context, *wiring) (service, error)) {
		c := &gateway.Config{}
		return c.AddFlags, func(_ context.Context, w *wiring) (service, error) {
			s, err := gatewayClients(w)
			if err != nil {
				return nil, err
			}
			g, err := gateway.New(c, s)
			if err != nil {
				return nil, err
			}
			return gatewayService{g}, nil
		}
	}},
}

// order is the one in which the services start.
var order = []string{"registry", "watchfanout", "authn", "authz", "admission", "gateway"}

// gatewayService makes the gateway, which is called over HTTPS alone, a service like the others.
type gatewayService struct{ *gateway.Service }

func (gatewayService) Register(grpc.ServiceRegistrar) {}

func gatewayClients(w *wiring) (s gateway.Services, err error) {
	connect := func(name string, p rpc.Policy) grpc.ClientConnInterface {
		conn, cerr := w.client(name, p)
		err = errors.Join(err, cerr)
		return conn
	}
	again := rpc.Policy{Idempotent: true}
	registry := connect("registry", again)
	s = gateway.Services{
		Authn:     authnv1.NewAuthnClient(connect("authn", again)),
		Authz:     authzv1.NewAuthzClient(connect("authz", again)),
		Admission: admissionv1.NewAdmissionClient(connect("admission", again)),
		Objects:   registryv1.NewObjectsClient(registry),
		Catalog:   registryv1.NewCatalogClient(registry),
		Source:    registryv1.NewSourceClient(registry),
		Policy:    watchfanoutv1.NewPolicyClient(registry),
		Writes:    registryv1.NewObjectsClient(connect("registry", rpc.Policy{})),
		Watch:     watchfanoutv1.NewWatchClient(connect("watchfanout", rpc.Policy{Idempotent: true, Sharded: true})),
	}
	return s, err
}

// process is what a process of one service is told beside the service's own settings.
type process struct {
	telemetry telemetry.Options
	id        rpc.TLS
	address   string
	peers     map[string]*[]string
	drain     time.Duration
}

func (p *process) addFlags(fs *pflag.FlagSet, name string, d *definition) {
	p.telemetry.AddFlags(fs)
	p.id.AddFlags(fs)
	if d.serves {
		fs.StringVar(&p.address, "rpc-address", "", "host:port to serve RPCs on.")
	}
	p.peers = map[string]*[]string{}
	for _, peer := range d.calls {
		p.peers[peer] = fs.StringSlice(peer+"-addresses", nil, "host:port of every replica of "+peer+", comma separated.")
	}
	fs.DurationVar(&p.drain, "drain-timeout", 10*time.Second, "How long RPCs in flight may take to end at shutdown.")
}

// serviceCommand runs one service until it is told to stop.
func serviceCommand(name string, args []string) error {
	d := services[name]
	fs := pflag.NewFlagSet("watershed "+name, pflag.ContinueOnError)
	p := &process{}
	p.addFlags(fs, name, d)
	addFlags, build := d.new()
	addFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return help(err)
	}
	ctx, cancel := lifecycle.Signalled()
	defer cancel()
	flush, err := p.telemetry.Start(ctx, name, os.Stderr)
	if err != nil {
		return err
	}
	defer flush()
	var conns []*grpc.ClientConn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	s, err := build(ctx, &wiring{id: p.id, log: func(*eventlog.Options) {}, client: func(peer string, policy rpc.Policy) (grpc.ClientConnInterface, error) {
		if len(*p.peers[peer]) == 0 {
			return nil, fmt.Errorf("--%s-addresses is required", peer)
		}
		c, err := rpc.Dial(p.id, *p.peers[peer], peer, policy)
		if err == nil {
			conns = append(conns, c)
		}
		return c, err
	}})
	if err != nil {
		return err
	}
	parts := []lifecycle.Part{{Name: name, Run: s.Run, StopTimeout: stopTimeout(s)}}
	metrics := registerMetrics(s)
	if d.serves {
		server, err := rpc.NewServer(p.id)
		if err != nil {
			return err
		}
		s.Register(server)
		parts = append(parts, lifecycle.Part{Name: "rpc", Run: func(ctx context.Context) error {
			go announce(ctx, s, server)
			if d, ok := s.(interface{ Drain() }); ok {
				defer context.AfterFunc(ctx, d.Drain)()
			}
			return server.Serve(ctx, p.address, p.drain)
		}})
	}
	parts = append(parts, lifecycle.Part{Name: "debug", Run: func(ctx context.Context) error { return p.telemetry.ServeDebug(ctx, metrics, pages(s)) }})
	return lifecycle.Run(ctx, parts, nil, nil)
}

// stopTimeout is how long a service says that it takes to stop; 0 where it does not say.
func stopTimeout(s service) time.Duration {
	if t, ok := s.(interface{ StopTimeout() time.Duration }); ok {
		return t.StopTimeout()
	}
	return 0
}

// announce turns the health of the RPC server with the service's readiness.
func announce(ctx context.Context, s service, server *rpc.Server) {
	for ctx.Err() == nil {
		server.SetReady(s.Ready(ctx) == nil)
		select {
		case <-ctx.Done():
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// registerMetrics adds the service's metrics to those of the libraries it is made of.
func registerMetrics(all ...service) prometheus.Gatherer {
	r := prometheus.NewRegistry()
	r.MustRegister(rpc.Metrics()...)
	for _, s := range all {
		r.MustRegister(s.Collectors()...)
	}
	return prometheus.Gatherers{r, legacyregistry.DefaultGatherer}
}

// pages are a service's own pages.
func pages(s service) map[string]http.Handler {
	out := map[string]http.Handler{"/healthz": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := s.Ready(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, "ok")
	})}
	if h, ok := s.(http.Handler); ok {
		out["/"] = h
	}
	return out
}

// help makes --help end well.
func help(err error) error {
	if errors.Is(err, pflag.ErrHelp) {
		os.Exit(0)
	}
	return err
}

func versionLine() string {
	return "watershed " + release + " (Kubernetes " + kubeversion.Info().GitVersion + ")"
}

// release is set when the binary is built.
var release = "development"
