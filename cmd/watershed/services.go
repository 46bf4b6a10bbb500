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
	"watershed.dev/platform/guard"
	"watershed.dev/platform/kubeversion"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
)

// process is what a process of one service is told beside the service's own settings.
type process struct {
	telemetry telemetry.Options
	id        rpc.TLS
	address   string
	peers     map[string]*[]string
	drain     time.Duration
	conns     []*grpc.ClientConn
}

func (p *process) addFlags(fs *pflag.FlagSet, m *module) {
	p.telemetry.AddFlags(fs)
	p.id.AddFlags(fs)
	if m.serves {
		fs.StringVar(&p.address, "rpc-address", "", "host:port to serve RPCs on.")
	}
	p.peers = map[string]*[]string{}
	for _, peer := range m.calls {
		p.peers[peer] = fs.StringSlice(peer+"-addresses", nil,
			"host:port of every replica of "+peer+", comma separated.")
	}
	fs.DurationVar(&p.drain, "drain-timeout", 10*time.Second, "How long RPCs in flight may take to end at shutdown.")
}

// serviceCommand runs one service until it is told to stop.
func serviceCommand(m *module, args []string) error {
	fs := pflag.NewFlagSet("watershed "+m.name, pflag.ContinueOnError)
	p := &process{}
	p.addFlags(fs, m)
	settings := m.settings()
	settings.AddFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return help(err)
	}
	ctx, cancel := lifecycle.Signalled()
	defer cancel()
	flush, err := p.telemetry.Start(ctx, m.name, os.Stderr)
	if err != nil {
		return err
	}
	defer flush()
	defer p.close()
	s, err := settings.build(ctx, &deps{id: p.id, log: func(*eventlog.Options) {}, dial: p.dial})
	if err != nil {
		return err
	}
	parts := []lifecycle.Part{{Name: m.name, Run: s.Run, StopTimeout: stopTimeout(s)}}
	if m.serves {
		server, err := rpc.NewServer(p.id)
		if err != nil {
			return err
		}
		s.Register(server)
		parts = append(parts, lifecycle.Part{
			Name: "rpc",
			Run:  func(ctx context.Context) error { return p.serve(ctx, s, server) },
		})
	}
	metrics := registerMetrics(s)
	parts = append(parts, lifecycle.Part{Name: "debug", Run: func(ctx context.Context) error {
		return p.telemetry.ServeDebug(ctx, metrics, pages(s))
	}})
	return lifecycle.Run(ctx, parts, nil, nil)
}

// dial connects to the replicas of another service.
func (p *process) dial(peer string, b rpc.Balancer) (grpc.ClientConnInterface, error) {
	if len(*p.peers[peer]) == 0 {
		return nil, fmt.Errorf("--%s-addresses is required", peer)
	}
	c, err := rpc.Dial(p.id, *p.peers[peer], peer, b)
	if err != nil {
		return nil, err
	}
	p.conns = append(p.conns, c)
	return c, nil
}

func (p *process) close() {
	for _, c := range p.conns {
		c.Close()
	}
}

// serve offers a service's RPCs until ctx is done.
func (p *process) serve(ctx context.Context, s service, server *rpc.Server) error {
	go s.Ready().OnChange(ctx, func(why error) { server.SetReady(why == nil) })
	if d, ok := s.(interface{ Drain() }); ok {
		defer context.AfterFunc(ctx, d.Drain)()
	}
	return server.Serve(ctx, p.address, p.drain)
}

// stopTimeout is how long a service says that it takes to stop; 0 where it does not say.
func stopTimeout(s service) time.Duration {
	if t, ok := s.(interface{ StopTimeout() time.Duration }); ok {
		return t.StopTimeout()
	}
	return 0
}

// registerMetrics adds the service's metrics to those of the libraries it is made of.
func registerMetrics(all ...service) prometheus.Gatherer {
	r := prometheus.NewRegistry()
	r.MustRegister(rpc.Metrics()...)
	r.MustRegister(guard.Metrics()...)
	for _, s := range all {
		r.MustRegister(s.Collectors()...)
	}
	return prometheus.Gatherers{r, legacyregistry.DefaultGatherer}
}

// pages are a service's own pages.
func pages(s service) map[string]http.Handler {
	out := map[string]http.Handler{"/healthz": http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		err := s.Ready().Err()
		if c, ok := s.(interface{ Check(context.Context) error }); err == nil && ok {
			err = c.Check(r.Context())
		}
		if err != nil {
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
