package process

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"

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
	fs.Visit(func(*pflag.Flag) {})              // sorts the flags, which concurrent reports read
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
