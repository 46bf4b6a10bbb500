package main

import (
	"slices"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/telemetry"
)

// splitOnlyFlags are services' flags that split says itself, differently for each process, or for its own etcd and NATS.
var splitOnlyFlags = []string{
	"debug-address", "health-address", "kubeconfig", "permit-port-sharing",
	"etcd-servers", "etcd-certfile", "etcd-keyfile", "etcd-cafile", "nats-url", "log-replicas",
}

// splitFlags are the flags of the processes that split runs, by service; "xds" has those that every process has.
type splitFlags map[string]*pflag.FlagSet

// newSplitFlags adds to split's own flags those of the services.
func newSplitFlags(fs *pflag.FlagSet) splitFlags {
	all := splitFlags{}
	for _, name := range append(moduleNames(), "xds") {
		own := pflag.NewFlagSet(name, pflag.ContinueOnError)
		new(telemetry.Options).AddFlags(own)
		if m := moduleOf(name); m != nil {
			m.Options().AddFlags(own)
		}
		addMissingFlags(own, fs, splitOnlyFlags...)
		all[name] = own
	}
	return all
}

// fromCommandLine is what the command was told, as settings of each service.
func (all splitFlags) fromCommandLine(fs *pflag.FlagSet) map[string]map[string]any {
	values := map[string]map[string]any{}
	for name, flags := range all {
		values[name] = map[string]any{}
		flags.VisitAll(func(f *pflag.Flag) {
			flag := fs.Lookup(f.Name)
			if flag == nil || !flag.Changed || slices.Contains(splitOnlyFlags, f.Name) {
				return
			}
			values[name][f.Name] = config.FileValue(flag)
		})
	}
	if modes, ok := values["authz"]["authorization-mode"].([]string); ok && slices.Contains(modes, alwaysAllow) {
		values["authn"]["anonymous-auth"] = false // as kube-apiserver does, also where it is asked for
	}
	return values
}
