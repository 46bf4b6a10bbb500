// Package xds is the xDS server that publishes the replicas of each service to Watershed's processes. It is built on
// go-control-plane. Its sources are EndpointSlices, DNS or a file.
//
// The server depends on no service that it helps to find, and its outage stops no process: clients continue with their
// last endpoints. A new server starts with the state file of the previous process. If a cluster hosts Watershed, the
// server reads EndpointSlices of that hosting cluster, and never calls the API server that Watershed serves.
//
// Each source runs in its own goroutine and calls server.set. The server's lock guards the replicas; the caches have
// their own locks. Readiness of a process with DNS or EndpointSlices:
//
//	no replica of a service known ──server.set or state file──> ready
//	no source reported, for readyTimeout ──> serving, and /readyz still names the services without replicas
//	requests to the hosting API fail for staleAfter ──> not serving for readyTimeout, then serving, each minute
//
// Review notes:
//
//   - Never publish an empty endpoint list. A source that lost its own data also reports no replica, so the last
//     replicas stay.
//   - Do not use a snapshot cache: it delays responses until a client has requested every resource of the snapshot
//     (go-control-plane issue 426).
//   - Do not add outlier detection to clusterOf: gRPC counts every status other than OK as a failure, including
//     cancelled watches, and then ejects healthy replicas.
//   - Publish endpoints before the resources that refer to them.
package xds

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
)

// Config holds the settings of the server.
type Config struct {
	// ID is the server's identity on the inner network: "xds".
	ID rpc.TLS
	// Address is the host:port, or unix:/path, to listen on.
	Address string
	// StateFile saves the replicas for the next start. Empty: no state is saved.
	StateFile string
	// File names the replicas of each service, and is read again after each change. A service must have only one
	// source: with two sources the last update wins.
	File string
	// DNS maps a service to its host:port. The name of a headless Service resolves to all its replicas.
	DNS map[string]string
	// DNSPeriod is the interval between DNS lookups.
	DNSPeriod time.Duration
	// Slices maps a service to the Service whose EndpointSlices list its replicas, as name:port. The Service is in
	// SlicesNamespace of the cluster of Kubeconfig. Empty Kubeconfig: the cluster that this process runs in.
	Slices                      map[string]string
	SlicesNamespace, Kubeconfig string

	telemetry telemetry.Options
	flags     *pflag.FlagSet
}

// AddFlags registers the server's flags with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.flags = fs
	c.telemetry.AddFlags(fs)
	c.ID.AddFlags(fs)
	fs.StringVar(&c.Address, "rpc-address", "", "The host:port, or unix:/path, to listen on.")
	fs.StringVar(&c.StateFile, "state-file", "", "The file that saves the state for the next start. Empty: none.")
	fs.StringVar(&c.File, "replicas-file", "",
		`A YAML file of the replicas of each service, {registry: ["host:port"]}. Changes are reloaded.`)
	fs.StringToStringVar(&c.DNS, "dns", nil,
		"Services to resolve by DNS: registry=registry.watershed.svc:7001. Every address of the name is a replica.")
	fs.DurationVar(&c.DNSPeriod, "dns-period", time.Second, "The interval between DNS lookups.")
	fs.StringToStringVar(&c.Slices, "endpoint-slices", nil,
		"Services to resolve by the EndpointSlices of a Service: registry=name:port, with a port name or number.")
	fs.StringVar(&c.SlicesNamespace, "endpoint-slices-namespace", "",
		"The namespace of the Services of --endpoint-slices.")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"The cluster of the EndpointSlices. Empty: the cluster of this pod. Never the cluster that Watershed serves.")
}

// validate returns an error that names each flag with an invalid value.
func (c *Config) validate() error {
	var errs []error
	if c.Address == "" {
		errs = append(errs, errors.New("--rpc-address is required"))
	}
	if c.File == "" && len(c.DNS) == 0 && len(c.Slices) == 0 {
		errs = append(errs, errors.New("one of --replicas-file, --dns and --endpoint-slices is required"))
	}
	if c.DNSPeriod < 100*time.Millisecond {
		errs = append(errs, fmt.Errorf("--dns-period %s: want 100ms at least", c.DNSPeriod))
	}
	if len(c.Slices) > 0 && c.SlicesNamespace == "" {
		errs = append(errs, errors.New("--endpoint-slices-namespace is required with --endpoint-slices"))
	}
	for name, address := range c.DNS {
		if a, err := rpc.ParseAddress(address); err != nil || a.Path != "" {
			errs = append(errs, fmt.Errorf("--dns %s=%s: want host:port", name, address))
		}
	}
	for name, target := range c.Slices {
		if service, port, ok := strings.Cut(target, ":"); !ok || service == "" || port == "" {
			errs = append(errs, fmt.Errorf("--endpoint-slices %s=%s: want name:port", name, target))
		}
		if _, twice := c.DNS[name]; twice {
			errs = append(errs, fmt.Errorf("%s is in --dns and in --endpoint-slices: want only one of them", name))
		}
	}
	return errors.Join(errs...)
}

// Command runs the server in its own process until a signal stops it.
func Command(fs *pflag.FlagSet) func() error {
	c := &Config{}
	c.AddFlags(fs)
	return func() error {
		if err := c.validate(); err != nil {
			return err
		}
		ctx, cancel := lifecycle.SignalContext()
		defer cancel()
		flush, err := c.telemetry.Start(ctx, "xds", os.Stderr)
		if err != nil {
			return err
		}
		defer flush()
		return c.run(ctx)
	}
}

// readyTimeout is the time after which a server without endpoints, or with stale endpoints, serves. Until then clients
// use other servers.
const readyTimeout = 10 * time.Second

func (c *Config) run(ctx context.Context) error {
	s := newServer(c.StateFile)
	server, err := rpc.NewServer(map[string]rpc.TLS{"xds": c.ID})
	if err != nil {
		return err
	}
	s.register(ctx, server)
	program := &process.Program{Name: "xds", Address: c.Address, ID: &c.ID, Flags: c.flags, NotReady: s.ready.Err}
	process.RegisterProcesses(server, program.Report)
	runners := []lifecycle.Runner{
		{Name: "rpc", Run: func(ctx context.Context) error {
			// A service without known replicas may wait for a known service, so the server is ready after the first
			// update. It is ready after readyTimeout in any case, because other servers may have no more replicas.
			go func() {
				select {
				case <-ctx.Done():
				case <-s.firstUpdate:
				case <-time.After(readyTimeout):
				}
				server.SetReady("xds", true)
			}()
			return server.Serve(ctx, c.Address, 0)
		}},
		{Name: "debug", Run: func(ctx context.Context) error {
			metrics, instance := process.NewMetrics(), &process.Instance{Name: "xds"}
			metrics.Add(append(s.collectors(), process.Expirations(&c.ID)))
			instance.Set(&process.Service{Ready: &s.ready, Status: s})
			pages := process.Pages(instance)
			pages["/report"] = process.ReportPage(program.Report)
			return c.telemetry.ServeDebug(ctx, metrics, pages)
		}},
	}
	if c.File != "" {
		f := &fileSource{path: c.File, server: s}
		if err := f.read(); err != nil {
			return err
		}
		runners = append(runners, lifecycle.Runner{Name: "replicas file", Run: f.watch})
	}
	for name, address := range c.DNS {
		d := &dnsSource{service: name, address: address, period: c.DNSPeriod, server: s}
		s.waitFor(name)
		runners = append(runners, lifecycle.Runner{Name: "DNS of " + name, Run: d.watch})
	}
	if len(c.Slices) > 0 {
		e, err := newSliceSource(c, s)
		if err != nil {
			return err
		}
		serve := func(ready bool) { server.SetReady("xds", ready) }
		runners = append(runners, lifecycle.Runner{Name: "EndpointSlices", Run: e.watch},
			lifecycle.Runner{Name: "hosting API", Run: func(ctx context.Context) error {
				return e.contact.yield(ctx, &s.ready, serve)
			}})
	}
	go process.ReleaseAtRest(ctx, &s.ready)
	return lifecycle.Run(ctx, runners, lifecycle.Observer{})
}
