package main

import (
	"slices"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/telemetry"
)

// splitOnlyFlags lists the flags of services that split sets itself: differently for each process, or for its own etcd
// and NATS.
var splitOnlyFlags = []string{
	"debug-address", "health-address", "kubeconfig", "permit-port-sharing",
	"etcd-servers", "etcd-certfile", "etcd-keyfile", "etcd-cafile", "nats-url", "log-replicas",
}

// splitFlags holds the flags of the processes that split runs, by service. "xds" has the flags of every process.
type splitFlags map[string]*pflag.FlagSet

// newSplitFlags adds the flags of the services to the flags of split.
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

// fromCommandLine returns the flags of the command line as settings of each service.
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
		values["authn"]["anonymous-auth"] = false // as kube-apiserver does, even if the flag is set
	}
	return values
}
