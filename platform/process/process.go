package process

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"sync"
	"time"
	_ "time/tzdata" // for CronJobs' and CEL's time zones: an image has no files

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"watershed.dev/platform/features"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
)

// Upstream's controllers end the process when they panic. An object in etcd can cause that: a CRD whose name has no
// dot, for example. The workers run under wait.Until, which restarts a worker after a panic.
func init() { utilruntime.ReallyCrash = false }

// Process is a process with any set of services:
//
//	New --AddFlags--> flags --Configure--> configured --Runners--> ready to run
type Process struct {
	// Telemetry has the options of logs, traces and pages.
	Telemetry telemetry.Options
	// Identity, if set, returns a service's identity on the inner network, in place of the flags.
	Identity func(service string) rpc.TLS
	// NATS, if set, returns the embedded NATS server, before the first service starts.
	NATS func() InProcessNATS

	modules  Modules // in start order
	services []*service
	network  network
	local    *rpc.InProcess
	flags    *pflag.FlagSet
	api      *api
}

// service is a service of the process: its flags and options, and later its instance.
type service struct {
	Instance
	module  *Module
	flags   *pflag.FlagSet
	options Options
}

// New returns a process with the targets, which are names of modules.
func New(all Modules, targets []string) (*Process, error) {
	sorted, err := all.Sort(targets)
	if err != nil {
		return nil, err
	}
	p := &Process{modules: sorted, api: &api{set: make(chan struct{})}}
	for _, m := range sorted {
		s := &service{Instance: Instance{Name: m.Name}, module: m, options: m.Options()}
		p.services = append(p.services, s)
		if s.options.ControlPlane != nil { // the services share the flag
			p.Telemetry.Tracing.Dialer = s.options.ControlPlane
		}
	}
	return p, nil
}

// name returns the name of the process in traces.
func (p *Process) name() string {
	if len(p.modules) == 1 {
		return p.modules[0].Name
	}
	return "watershed"
}

func (p *Process) has(service string) bool { return p.modules.Get(service) != nil }

// servesAPI reports if the process has the gateway, which Sort puts last.
func (p *Process) servesAPI() bool { return p.modules[len(p.modules)-1].ServesAPI }

// outside reports if any of the services is not in the process.
func (p *Process) outside(services []string) bool {
	return slices.ContainsFunc(services, func(s string) bool { return !p.has(s) })
}

// Exposed returns the services of the process that services outside of it may call.
func (p *Process) Exposed() (services []string) {
	for _, m := range p.modules {
		if p.outside(m.Clients()) {
			services = append(services, m.Name)
		}
	}
	return services
}

// callers maps the services outside of the process to the services of the process that call them.
func (p *Process) callers() map[string][]string {
	callers := map[string][]string{}
	for _, m := range p.modules {
		for _, name := range m.DependsOn {
			if !p.has(name) {
				callers[name] = append(callers[name], m.Name)
			}
		}
	}
	return callers
}

// StopTimeout returns how long the process may take to stop: the drain of its RPCs, the services with a timeout of
// their own, and lifecycle.StopTimeout for all other runners together.
func (p *Process) StopTimeout() time.Duration {
	timeout := lifecycle.StopTimeout + p.network.drain + time.Second
	for _, s := range p.services {
		if s.options.StopTimeout != nil {
			timeout += s.options.StopTimeout()
		}
	}
	return timeout
}

// Runners returns the process's runners: the debug pages, the services, and their RPCs. The pages start first. A
// service that waits for a dependency, as the registry does for etcd, is then alive and reports why it is not ready.
func (p *Process) Runners(ctx context.Context) ([]lifecycle.Runner, error) {
	for _, line := range features.WithoutEffect() {
		slog.Warn("A feature gate has no effect", "gate", line)
	}
	p.local = rpc.NewInProcess(telemetry.TracingEnabled())
	if i := slices.IndexFunc(p.modules, func(m *Module) bool { return p.outside(m.DependsOn) }); i >= 0 {
		if err := p.network.startXDS(ctx, p.modules[i].Name); err != nil {
			return nil, err
		}
	}
	var registrar grpc.ServiceRegistrar = p.local
	var server *rpc.Server
	if exposed := p.Exposed(); len(exposed) > 0 {
		ids := map[string]rpc.TLS{}
		for _, name := range exposed {
			ids[name] = p.identity(name)
		}
		var err error
		if server, err = rpc.NewServer(ids); err != nil {
			return nil, err
		}
		registrar = &exposedRegistrar{p, server}
	}
	RegisterProcesses(registrar, p.Report)
	metrics := p.network.metrics()
	metrics.Add([]prometheus.Collector{expirations{p.certificates}})
	readiness := p.readiness()
	runners := []lifecycle.Runner{{Name: "debug", Run: func(ctx context.Context) error {
		go rpc.Traffic.Run(ctx)
		go ReleaseAtRest(ctx, readiness.Ready)
		var all []*Instance
		for _, s := range p.services {
			all = append(all, &s.Instance)
		}
		pages := Pages(all...)
		pages["/report"] = ReportPage(p.Report)
		return p.Telemetry.ServeDebug(ctx, metrics, pages)
	}}}
	for _, s := range p.services {
		runners = append(runners, p.runner(s, registrar, metrics))
	}
	if server != nil {
		at := len(runners)
		if p.servesAPI() { // the gateway stops first: its last requests need watchfanout, which needs the RPCs
			at--
		}
		runners = slices.Insert(runners, at, lifecycle.Runner{
			Name:        "rpc",
			StopTimeout: func() time.Duration { return p.network.drain + time.Second },
			Run:         func(ctx context.Context) error { return p.serve(ctx, server) },
		})
	}
	return append(runners, readiness), nil
}

// runner returns the runner of a service. If a service that starts later calls it, the runner is ready once the service
// is. Otherwise it is ready once the service is built.
func (p *Process) runner(s *service, registrar grpc.ServiceRegistrar, metrics *Metrics) lifecycle.Runner {
	name := s.module.Name
	ready := lifecycle.NotReady(name)
	called := slices.ContainsFunc(p.modules, func(m *Module) bool { return slices.Contains(m.DependsOn, name) })
	stopTimeout := func() time.Duration {
		if s.options.StopTimeout == nil {
			return 0
		}
		return s.options.StopTimeout()
	}
	return lifecycle.Runner{Name: name, Ready: ready, StopTimeout: stopTimeout, Run: func(ctx context.Context) error {
		d := p.deps(name)
		d.Starting = func(reason error) {
			s.starting.Store(&reason)
			ready.Set(name, reason)
		}
		built, err := s.options.Build(ctx, d)
		if err != nil {
			return err
		}
		built.Register(registrar)
		metrics.Add(built.Collectors)
		s.Set(built)
		if built.Traffic != nil {
			go built.Traffic.Run(ctx)
		}
		if built.API != nil {
			p.api.handler = built.API
			close(p.api.set)
		}
		if called {
			go built.Ready.OnChange(ctx, func(reason error) { ready.Set(name, reason) })
		} else {
			ready.Set(name, nil)
		}
		return built.Run(ctx)
	}}
}

// deps returns the dependencies with which a service is built.
func (p *Process) deps(name string) *Deps {
	d := &Deps{
		ID:      p.identity(name),
		Flags:   p.flags,
		Report:  p.Report,
		Reports: func(ctx context.Context, kind Kind) []*Report { return p.reports(ctx, name, kind) },
		Dial: func(peer string) (grpc.ClientConnInterface, error) {
			if p.has(peer) {
				return p.local.Client(name), nil
			}
			return p.network.dial(name, peer)
		},
	}
	if p.servesAPI() {
		d.API = p.api
	}
	if p.NATS != nil {
		d.NATS = p.NATS()
	}
	return d
}

func (p *Process) identity(service string) rpc.TLS {
	if p.Identity != nil {
		return p.Identity(service)
	}
	return p.network.id.Of(service)
}

// api implements API.
type api struct {
	sync.Map
	set     chan struct{}
	handler http.Handler
}

// ServeHTTP implements http.Handler.
func (a *api) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	select {
	case <-a.set:
		a.handler.ServeHTTP(w, req)
	case <-req.Context().Done():
		http.Error(w, "the gateway is starting", http.StatusServiceUnavailable)
	}
}

// exposedRegistrar registers contracts in the process and, if a service outside of the process may call them, on the
// network.
type exposedRegistrar struct {
	*Process
	server *rpc.Server
}

// RegisterService implements grpc.ServiceRegistrar.
func (r *exposedRegistrar) RegisterService(d *grpc.ServiceDesc, impl any) {
	r.local.RegisterService(d, impl)
	if r.outside(rpc.Clients("/" + d.ServiceName + "/")) {
		r.server.RegisterService(d, impl)
	}
}

// serve serves the RPCs of the process's services until ctx is done.
func (p *Process) serve(ctx context.Context, server *rpc.Server) error {
	for _, s := range p.services {
		if !p.outside(s.module.Clients()) {
			continue
		}
		built := s.Get()
		go built.Ready.OnChange(ctx, func(err error) { server.SetReady(s.module.Name, err == nil) })
		if built.Drain != nil {
			// by then clients have started their streams at other replicas
			defer context.AfterFunc(ctx, func() {
				time.AfterFunc(min(rpc.LameDuckPeriod, p.network.drain/2), built.Drain)
			})()
		}
	}
	return server.Serve(ctx, p.network.address, p.network.drain)
}

// readiness returns a runner that only reports readiness: it is ready once every service is ready and has read the
// cluster's policy. From then on no request is rejected because of unread policies.
func (p *Process) readiness() lifecycle.Runner {
	ready := &lifecycle.Readiness{}
	for _, s := range p.services {
		ready.Set(s.module.Name, errors.New("it is starting"))
	}
	return lifecycle.Runner{Name: "readiness", Ready: ready, Run: func(ctx context.Context) error {
		for _, s := range p.services {
			name, policies := s.module.Name, cmp.Or(s.Get().Policies, &lifecycle.Readiness{})
			go s.Get().Ready.OnChange(ctx, func(reason error) { ready.Set(name, reason) })
			go policies.OnChange(ctx, func(reason error) { ready.Set(name+"'s policies", reason) })
		}
		<-ctx.Done()
		return nil
	}}
}
