// Package xds tells Watershed's processes where the replicas of each service are: an xDS server, made with
// go-control-plane, fed by EndpointSlices, by DNS or by a file.
//
// It depends on nothing that it helps to find, and nothing stops while it is away: its clients go on by what they know,
// and so does a server that starts, by what the one before it wrote down. It is told by Kubernetes where a cluster
// hosts Watershed; the API server that it serves is never asked.
package xds

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
)

// Config is the server's settings.
type Config struct {
	// ID is its identity on the inner network: "xds".
	ID rpc.TLS
	// Address is the host:port that it serves on.
	Address string
	// StateFile keeps what is known for the next start; empty: nothing is kept.
	StateFile string
	// File names the replicas of each service, and is read again when it has changed. A service is to be in one source
	// alone: of two the one that speaks last is told.
	File string
	// DNS are host:port of each service, by name: a headless Service's name has all its replicas.
	DNS map[string]string
	// DNSPeriod is how often names are looked up.
	DNSPeriod time.Duration
	// Slices are the Services, by the name of the service, whose EndpointSlices name its replicas: name:port, in the
	// namespace SlicesNamespace of the cluster of Kubeconfig; empty: of the cluster that this runs in.
	Slices                      map[string]string
	SlicesNamespace, Kubeconfig string

	telemetry telemetry.Options
}

// AddFlags adds the server's flags, with their defaults.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	c.telemetry.AddFlags(fs)
	c.ID.AddFlags(fs)
	fs.StringVar(&c.Address, "rpc-address", "", "host:port, or unix:/path, to serve on.")
	fs.StringVar(&c.StateFile, "state-file", "", "Where what is known is kept for the next start. Empty: nowhere.")
	fs.StringVar(&c.File, "replicas-file", "",
		`A YAML file of each service's replicas, {registry: ["host:port"]}, which is read again when it has changed.`)
	fs.StringToStringVar(&c.DNS, "dns", nil,
		"Services found by DNS: registry=registry.watershed.svc:7001; every address of the name is a replica.")
	fs.DurationVar(&c.DNSPeriod, "dns-period", time.Second, "How often names are looked up.")
	fs.StringToStringVar(&c.Slices, "endpoint-slices", nil,
		"Services found by the EndpointSlices of a Service: registry=name:port, the port by its name or number.")
	fs.StringVar(&c.SlicesNamespace, "endpoint-slices-namespace", "", "The namespace of those Services.")
	fs.StringVar(&c.Kubeconfig, "kubeconfig", "",
		"The cluster that has those EndpointSlices. Empty: the one that this runs in. Never the one that is served.")
}

// validate says what is wrong with the settings, by flag.
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
			errs = append(errs, fmt.Errorf("%s is named by --dns and by --endpoint-slices; want one of them", name))
		}
	}
	return errors.Join(errs...)
}

// Command runs the server in a process of its own until it is told to stop.
func Command(command string, args []string) error {
	fs := pflag.NewFlagSet(command, pflag.ContinueOnError)
	c := &Config{}
	c.AddFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return process.ExitOnHelp(err)
	}
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

// readyTimeout is how long a server that knows nothing leaves its clients to others.
const readyTimeout = 10 * time.Second

func (c *Config) run(ctx context.Context) error {
	s := newServer(c.StateFile)
	server, err := rpc.NewServer(c.ID)
	if err != nil {
		return err
	}
	s.register(ctx, server)
	runners := []lifecycle.Runner{
		{Name: "rpc", Run: func(ctx context.Context) error {
			// What it does not know yet may wait for what it knows, so it serves as soon as it knows anything; and
			// after a while in any case, since nobody else may know more.
			go func() {
				select {
				case <-ctx.Done():
				case <-s.firstUpdate:
				case <-time.After(readyTimeout):
				}
				server.SetReady(true)
			}()
			return server.Serve(ctx, c.Address, 0)
		}},
		{Name: "debug", Run: func(ctx context.Context) error {
			metrics, pages := process.NewMetrics(), &process.Instance{Name: "xds"}
			metrics.Add(s)
			pages.Set(s)
			return c.telemetry.ServeDebug(ctx, metrics, pages.Pages())
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
		runners = append(runners, lifecycle.Runner{Name: "EndpointSlices", Run: e.watch})
	}
	return lifecycle.Run(ctx, runners, nil, nil)
}
