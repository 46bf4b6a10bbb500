package config

import (
	"slices"
	"time"

	"github.com/spf13/pflag"
)

// UnsupportedFlag describes a kube-apiserver flag that Watershed does not implement. The flag accepts the values that
// change nothing.
type UnsupportedFlag struct {
	// Reason names the replacement, or says that none exists.
	Reason string
	// Omit is true if the operator should remove the flag and has nothing to replace it with.
	Omit bool
	// define defines the flag in a flag set, with kube-apiserver's type and default.
	define func(fs *pflag.FlagSet, name string)
	// noop are the accepted values in addition to the default.
	noop []string
	// ignored is true if no value has an effect.
	ignored bool
}

// Error returns Reason, and the advice to remove the flag if Omit is true.
func (u *UnsupportedFlag) Error() string {
	if u.Omit {
		return u.Reason + "; leave the flag out"
	}
	return u.Reason
}

// Unsupported returns the description of f if AddUnsupported has added it.
func Unsupported(f *pflag.Flag) (u *UnsupportedFlag, ok bool) {
	if v, ok := f.Value.(*unsupportedValue); ok {
		return v.flag, true
	}
	return nil, false
}

// AddUnsupported adds the kube-apiserver flags that fs lacks. They are hidden. Each accepts the values that change
// nothing, and rejects others with the reason.
func AddUnsupported(fs *pflag.FlagSet) {
	for name, u := range unsupportedFlags {
		if fs.Lookup(name) != nil {
			continue
		}
		own := pflag.NewFlagSet(name, pflag.ContinueOnError)
		u.define(own, name)
		f := own.Lookup(name)
		f.Hidden = true
		f.Value = &unsupportedValue{f.Value, u, f.DefValue}
		fs.AddFlag(f)
	}
}

// unsupportedValue is the value of an unsupported flag.
type unsupportedValue struct {
	pflag.Value
	flag     *UnsupportedFlag
	standard string
}

// Set implements pflag.Value.
func (v *unsupportedValue) Set(text string) error {
	if err := v.Value.Set(text); err != nil {
		return err
	}
	if got := v.String(); !v.flag.ignored && got != v.standard && !slices.Contains(v.flag.noop, got) {
		return v.flag
	}
	return nil
}

// Definitions of flags by type. The argument is kube-apiserver's default.
func text(standard string) func(*pflag.FlagSet, string) {
	return func(fs *pflag.FlagSet, name string) { fs.String(name, standard, "") }
}

func boolean(standard bool) func(*pflag.FlagSet, string) {
	return func(fs *pflag.FlagSet, name string) { fs.Bool(name, standard, "") }
}

func integer(standard int) func(*pflag.FlagSet, string) {
	return func(fs *pflag.FlagSet, name string) { fs.Int(name, standard, "") }
}

func duration(standard time.Duration) func(*pflag.FlagSet, string) {
	return func(fs *pflag.FlagSet, name string) { fs.Duration(name, standard, "") }
}

func list(fs *pflag.FlagSet, name string) { fs.StringSlice(name, nil, "") }

const (
	only136   = "only Kubernetes 1.36 itself is served"
	ringBytes = "the watch cache bounds events by size: --watch-ring-bytes"
	ownLogs   = "logs are written as they come, unbuffered, to one stream"
	noPeers   = "every gateway serves every resource and proxies to no other gateway"
)

// unsupportedFlags is the only list of kube-apiserver's flags that Watershed does not implement, for every command.
var unsupportedFlags = map[string]*UnsupportedFlag{
	"cert-dir": {
		define: text(""),
		Reason: "`watershed up` and `watershed split` have the flag; set --tls-cert-file and --tls-private-key-file",
	},
	"debug-socket-path":        {define: text(""), Reason: "--debug-address accepts the path of a socket"},
	"default-watch-cache-size": {define: integer(100), ignored: true, Reason: ringBytes},
	"emulated-version": {
		define: list, noop: []string{"[1.36]", "[kube=1.36]"}, Reason: only136, Omit: true,
	},
	"emulation-forward-compatible":                {define: boolean(false), Reason: only136, Omit: true},
	"runtime-config-emulation-forward-compatible": {define: boolean(false), Reason: only136, Omit: true},
	"min-compatibility-version": {
		define: list, noop: []string{"[1.35]", "[kube=1.35]", "[1.36]", "[kube=1.36]"}, Reason: only136, Omit: true,
	},
	"enable-logs-handler": {define: boolean(false), Reason: "/logs is not served", Omit: true},
	"kubelet-read-only-port": {
		define: func(fs *pflag.FlagSet, name string) { fs.Uint(name, 10255, "") }, ignored: true,
		Reason: "kube-apiserver has deprecated the flag",
	},
	"log-flush-frequency":       {define: duration(5 * time.Second), ignored: true, Reason: ownLogs},
	"log-json-info-buffer-size": {define: text("0"), Reason: ownLogs, Omit: true},
	"log-json-split-stream":     {define: boolean(false), Reason: ownLogs, Omit: true},
	"log-text-info-buffer-size": {define: text("0"), Reason: ownLogs, Omit: true},
	"log-text-split-stream":     {define: boolean(false), Reason: ownLogs, Omit: true},
	"peer-advertise-ip":         {define: text(""), Reason: noPeers, Omit: true},
	"peer-advertise-port":       {define: text(""), Reason: noPeers, Omit: true},
	"peer-ca-file":              {define: text(""), Reason: noPeers, Omit: true},
	// Go's listeners always have SO_REUSEADDR.
	"permit-address-sharing": {define: boolean(false), ignored: true, Reason: "addresses can always be shared"},
	"storage-backend": {
		define: text(""), noop: []string{"etcd3"}, Reason: "etcd3 is the only storage backend", Omit: true,
	},
	// kube-apiserver waits for its watch caches so long before it is ready. Watershed has none in front of etcd.
	"storage-initialization-timeout": {define: duration(time.Minute), ignored: true, Reason: "no cache is initialized"},
	"watch-cache": {
		define: boolean(true), Reason: "the watch cache is always enabled", Omit: true,
	},
	"watch-cache-sizes": {define: list, ignored: true, Reason: ringBytes},
}
