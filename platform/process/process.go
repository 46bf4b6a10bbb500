package process

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"time"
	_ "time/tzdata" // for CronJobs' and CEL's time zones: an image has no files

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"

	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/version"
)

// Upstream's controllers end the process when they panic. An object in etcd can cause that: a CRD whose name has no
// dot, for example. The workers run under wait.Until, which restarts a worker after a panic.
func init() { utilruntime.ReallyCrash = false }

// Main is the main function of a service's binary. It runs the service with the options of the command line until
// SIGINT or SIGTERM, or prints the version.
func Main(m *Module) {
	CommandMain(m.Name, func(name string, args []string) error { return Run(m, name, args) })
}

// Run runs a service with the options in args until SIGINT or SIGTERM. command is the name of its flag set.
func Run(m *Module, command string, args []string) error {
	fs := pflag.NewFlagSet(command, pflag.ContinueOnError)
	p := &process{}
	options := p.addFlags(fs, m)
	if err := config.Load(fs, args); err != nil {
		return ExitOnHelp(err)
	}
	ctx, cancel := lifecycle.SignalContext()
	defer cancel()
	flush, err := p.telemetry.Start(ctx, m.Name, os.Stderr)
	if err != nil {
		return err
	}
	defer flush()
	slog.Info("Starting", "version", version.Release())
	defer p.close()
	if err := p.findReplicas(ctx); err != nil {
		return err
	}
	runners, err := p.runners(m, options)
	if err != nil {
		return err
	}
	return lifecycle.Run(ctx, runners, nil, nil)
}

// runners returns the process's runners: the debug pages, the service, and its RPCs. The pages start first. A service
// that waits for a dependency, as the registry does for etcd, is then alive and reports why it is not ready.
func (p *process) runners(m *Module, options Options) ([]lifecycle.Runner, error) {
	server, err := rpc.NewServer(p.id)
	if err != nil {
		return nil, err
	}
	instance := &Instance{Name: m.Name}
	metrics := NewMetrics()
	ready := lifecycle.NotReady(m.Name)
	runners := []lifecycle.Runner{
		{Name: "debug", Run: func(ctx context.Context) error {
			return p.telemetry.ServeDebug(ctx, metrics, instance.Pages())
		}},
		{Name: m.Name, Ready: ready, StopTimeout: instance.stopTimeout, Run: func(ctx context.Context) error {
			s, err := options.Build(ctx, &Deps{ID: p.id, Dial: p.dial})
			if err != nil {
				return err
			}
			s.Register(server)
			metrics.Add(s)
			instance.Set(s)
			ready.Set(m.Name, nil)
			return s.Run(ctx)
		}},
	}
	if m.ServesRPC {
		runners = append(runners, lifecycle.Runner{
			Name:        "rpc",
			StopTimeout: func() time.Duration { return p.drain + time.Second },
			Run:         func(ctx context.Context) error { return p.serve(ctx, instance.Get(), server) },
		})
	}
	return runners, nil
}

// CheckConfig returns an error if the service's process does not accept the configuration file.
func CheckConfig(m *Module, file string) error {
	fs := pflag.NewFlagSet(m.Name, pflag.ContinueOnError)
	new(process).addFlags(fs, m)
	return config.Load(fs, []string{"--config", file})
}

// ExitOnHelp exits with status 0 if err is --help. Otherwise it returns err.
func ExitOnHelp(err error) error {
	if errors.Is(err, pflag.ErrHelp) {
		os.Exit(0)
	}
	return err
}

// process holds the options that all services have, and the connections of a process.
type process struct {
	telemetry telemetry.Options
	id        rpc.TLS
	address   string
	peers     map[string]*[]string
	// xds finds replicas instead of peers if there are xDS servers.
	xdsServers  []string
	xdsCacheDir string
	xds         *rpc.XDS
	drain       time.Duration
	conns       []*grpc.ClientConn
}

// addFlags adds the process's flags and the service's flags. It returns the service's options.
func (p *process) addFlags(fs *pflag.FlagSet, m *Module) Options {
	p.telemetry.AddFlags(fs)
	p.id.AddFlags(fs)
	if m.ServesRPC {
		fs.StringVar(&p.address, "rpc-address", "", "host:port, or unix:/path, to serve RPCs on.")
	}
	p.peers = map[string]*[]string{}
	for _, peer := range m.DependsOn {
		p.peers[peer] = fs.StringSlice(
			peer+"-addresses",
			nil,
			"host:port, or unix:/path, of every replica of "+peer+", comma separated. With --xds-servers: only until "+
				"an xDS server has responded.",
		)
	}
	if len(m.DependsOn) > 0 {
		fs.StringSliceVar(&p.xdsServers, "xds-servers", nil,
			"host:port of every replica of the xDS server, which sends the addresses of other services' replicas.")
		fs.StringVar(&p.xdsCacheDir, "xds-cache-dir", "",
			"The directory that caches the xDS server's responses for the next start. Empty: no cache.")
	}
	fs.DurationVar(&p.drain, "drain-timeout", 10*time.Second, "How long RPCs in flight may take to end at shutdown.")
	options := m.Options()
	options.AddFlags(fs)
	return options
}

// findReplicas checks the addresses of other services, and starts the xDS client if there are xDS servers.
func (p *process) findReplicas(ctx context.Context) (err error) {
	for peer, addresses := range p.peers {
		if err := rpc.CheckAddresses(peer+"-addresses", *addresses); err != nil {
			return err
		}
	}
	if err := rpc.CheckAddresses("xds-servers", p.xdsServers); err != nil {
		return err
	}
	if len(p.xdsServers) == 0 {
		return nil
	}
	host, _ := os.Hostname()
	c := rpc.XDSConfig{Servers: p.xdsServers, Dir: p.xdsCacheDir, Node: host, Fallback: map[string][]string{}}
	for peer, addresses := range p.peers {
		c.Fallback[peer] = *addresses
	}
	if p.xds, err = rpc.NewXDS(p.id, c); err == nil {
		go p.xds.Run(context.WithoutCancel(ctx)) // until the process ends: a draining service makes calls
	}
	return err
}

// dial returns a connection to the replicas of another service.
func (p *process) dial(peer string) (grpc.ClientConnInterface, error) {
	var replicas rpc.Replicas = rpc.Addresses(*p.peers[peer])
	if p.xds != nil {
		replicas = p.xds
	} else if len(*p.peers[peer]) == 0 {
		return nil, fmt.Errorf("--%s-addresses or --xds-servers is required", peer)
	}
	c, err := rpc.Dial(p.id, peer, replicas)
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

// serve serves a service's RPCs until ctx is done.
func (p *process) serve(ctx context.Context, s Service, server *rpc.Server) error {
	go s.Ready().OnChange(ctx, func(err error) { server.SetReady(err == nil) })
	if d, ok := s.(interface{ Drain() }); ok {
		// by then clients have started their streams at other replicas
		defer context.AfterFunc(ctx, func() { time.AfterFunc(min(rpc.LameDuckPeriod, p.drain/2), d.Drain) })()
	}
	return server.Serve(ctx, p.address, p.drain)
}
