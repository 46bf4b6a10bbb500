package main

import (
	"slices"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
	"watershed.dev/platform/telemetry"
)

// ofSplit are services' flags that split says itself, differently for each process, or for its own etcd and NATS.
var ofSplit = []string{
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
			m.Settings().AddFlags(own)
		}
		show(own, fs, ofSplit...)
		all[name] = own
	}
	return all
}

// told is what the command was told, as settings of each service.
func (all splitFlags) told(fs *pflag.FlagSet) map[string]map[string]any {
	told := map[string]map[string]any{}
	for name, own := range all {
		told[name] = map[string]any{}
		own.VisitAll(func(f *pflag.Flag) {
			given := fs.Lookup(f.Name)
			if given == nil || !given.Changed || slices.Contains(ofSplit, f.Name) {
				return
			}
			told[name][f.Name] = config.Setting(given)
		})
	}
	if modes, ok := told["authz"]["authorization-mode"].([]string); ok && slices.Contains(modes, allowsEverybody) {
		told["authn"]["anonymous-auth"] = false // as kube-apiserver does, also where it is asked for
	}
	return told
}
