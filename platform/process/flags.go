package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"

	"watershed.dev/platform/config"
	"watershed.dev/platform/rpc"
)

// perService lists the flags that name a file of each service: rpc.ServicePlaceholder stands for the service's name.
var perService = []string{"kubeconfig", "rpc-cert-file", "rpc-key-file"}

// describePlaceholder adds rpc.ServicePlaceholder to the usage of a flag in perService.
func describePlaceholder(f *pflag.Flag) {
	if slices.Contains(perService, f.Name) {
		f.Usage += " " + rpc.ServicePlaceholder + " stands for the name of each service of the process."
	}
}

// AddFlags adds the flags of logs, traces and pages, and the flags of every service, without the flags in except.
// Services share the flags of the same name.
func (p *Process) AddFlags(fs *pflag.FlagSet, except ...string) {
	add := func(name string, options func(*pflag.FlagSet)) *pflag.FlagSet {
		own := pflag.NewFlagSet(name, pflag.ContinueOnError)
		options(own)
		own.VisitAll(func(f *pflag.Flag) {
			if fs.Lookup(f.Name) == nil && !slices.Contains(except, f.Name) {
				describePlaceholder(f)
				fs.AddFlag(f)
			}
		})
		return own
	}
	add("process", p.Telemetry.AddFlags)
	for _, s := range p.services {
		s.flags = add(s.module.Name, s.options.AddFlags)
	}
	config.AddUnsupported(fs)
}

// AddNetworkFlags adds the flags of the process's connections to the services of other processes.
func (p *Process) AddNetworkFlags(fs *pflag.FlagSet) {
	n := &p.network
	n.id.AddFlags(fs)
	fs.VisitAll(describePlaceholder)
	if len(p.Exposed()) > 0 {
		fs.StringVar(&n.address, "rpc-address", "", "host:port, or unix:/path, to serve RPCs on.")
	}
	n.peers = map[string]*[]string{}
	for peer := range p.callers() {
		n.peers[peer] = fs.StringSlice(
			peer+"-addresses",
			nil,
			"host:port, or unix:/path, of every replica of "+peer+", comma separated. With --xds-servers: only until "+
				"an xDS server has responded.",
		)
	}
	if len(n.peers) > 0 {
		fs.StringSliceVar(&n.xdsServers, "xds-servers", nil,
			"host:port of every replica of the xDS server, which sends the addresses of other services' replicas.")
		fs.StringVar(&n.xdsCacheDir, "xds-cache-dir", "",
			"The directory that caches the xDS server's responses for the next start. Empty: no cache.")
	}
	fs.DurationVar(&n.drain, "drain-timeout", 10*time.Second, "How long RPCs in flight may take to end at shutdown.")
}

// Configure copies the flags that fs has received to every service, and validates them. Call it before Runners.
func (p *Process) Configure(fs *pflag.FlagSet) error {
	p.flags = fs
	kubeconfig, _ := fs.GetString("kubeconfig") // the services share the flag and replace the placeholder
	var errs []error
	for _, s := range p.services {
		s.flags.VisitAll(func(f *pflag.Flag) {
			switch from := fs.Lookup(f.Name); {
			case from == nil || !from.Changed:
			case f.Name == "kubeconfig":
				path := strings.ReplaceAll(kubeconfig, rpc.ServicePlaceholder, s.module.Name)
				errs = append(errs, s.flags.Set(f.Name, path))
			case f != from:
				errs = append(errs, copyValue(s.flags, f, from))
			}
		})
	}
	invalid := map[string]bool{} // services share flags, and their errors
	for _, s := range p.services {
		if err := s.options.Validate(); err != nil && !invalid[err.Error()] {
			invalid[err.Error()] = true
			errs = append(errs, err)
		}
	}
	return errors.Join(append(errs, p.network.validate(len(p.services), p.callers()))...)
}

func copyValue(fs *pflag.FlagSet, to, from *pflag.Flag) error {
	if s, ok := from.Value.(pflag.SliceValue); ok {
		if d, ok := to.Value.(pflag.SliceValue); ok {
			to.Changed = true
			return d.Replace(s.GetSlice())
		}
		return fs.Set(to.Name, strings.Join(s.GetSlice(), ","))
	}
	return fs.Set(to.Name, from.Value.String())
}

// network holds the process's connections to the services of other processes.
type network struct {
	id      rpc.TLS
	address string
	peers   map[string]*[]string
	// xds finds replicas instead of peers if there are xDS servers.
	xdsServers  []string
	xdsCacheDir string
	xds         *rpc.XDS
	drain       time.Duration
	conns       []*grpc.ClientConn
}

// validate checks the addresses of other services, and that several services have identities of their own. callers are
// the services that call each service of another process.
func (n *network) validate(services int, callers map[string][]string) error {
	var errs []error
	for _, peer := range slices.Sorted(maps.Keys(n.peers)) {
		errs = append(errs, rpc.CheckAddresses(peer+"-addresses", *n.peers[peer]))
		if len(*n.peers[peer]) == 0 && len(n.xdsServers) == 0 {
			errs = append(errs, fmt.Errorf("--%s-addresses or --xds-servers is required: %s calls %s, which is not "+
				"among the targets", peer, strings.Join(callers[peer], " and "), peer))
		}
	}
	errs = append(errs, rpc.CheckAddresses("xds-servers", n.xdsServers))
	if cert := n.id.CertFile; services > 1 && cert != "" && !strings.Contains(cert, rpc.ServicePlaceholder) {
		errs = append(errs, fmt.Errorf("--rpc-cert-file %q: want %s in the path, because the process has several "+
			"services", cert, rpc.ServicePlaceholder))
	}
	return errors.Join(errs...)
}

// startXDS starts the client of the xDS servers, if there are any. The client has the identity of a service.
func (n *network) startXDS(ctx context.Context, service string) (err error) {
	if len(n.xdsServers) == 0 {
		return nil
	}
	host, _ := os.Hostname()
	c := rpc.XDSConfig{Servers: n.xdsServers, Dir: n.xdsCacheDir, Node: host, Fallback: map[string][]string{}}
	for peer, addresses := range n.peers {
		c.Fallback[peer] = *addresses
	}
	if n.xds, err = rpc.NewXDS(n.id.Of(service), c); err == nil {
		go n.xds.Run(context.WithoutCancel(ctx)) // until the process ends: a draining service makes calls
	}
	return err
}

// metrics returns the metrics of the process and of its xDS client, if it has a client.
func (n *network) metrics() *Metrics {
	m := NewMetrics()
	if n.xds != nil {
		m.Add(n.xds.Metrics())
	}
	return m
}

// replicas returns the replicas of a service of other processes.
func (n *network) replicas(service string) rpc.Replicas {
	if n.xds == nil {
		return rpc.Addresses(*n.peers[service])
	}
	return n.xds
}

// dial returns a service's connection to the replicas of another service.
func (n *network) dial(from, to string) (grpc.ClientConnInterface, error) {
	c, err := rpc.Dial(n.id.Of(from), to, n.replicas(to))
	if err != nil {
		return nil, err
	}
	c.Connect() // otherwise the first call would, and until then the addresses of the replicas are unknown
	n.conns = append(n.conns, c)
	return c, nil
}

func (n *network) close() {
	for _, c := range n.conns {
		c.Close()
	}
}
