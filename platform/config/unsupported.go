package config

import "strings"

// UnsupportedFlag describes a kube-apiserver flag that Watershed does not support.
type UnsupportedFlag struct {
	// Reason names the replacement, or says that none exists.
	Reason string
	// Omit is true if the operator should remove the flag and has nothing to replace it with.
	Omit bool
	// NoopValue is the flag value that loses nothing when the flag is removed. Empty: no such value exists.
	NoopValue string
	// BlocksMigration is true if a cluster that kube-apiserver served with the flag cannot be served without it.
	BlocksMigration bool
}

// Error returns Reason, and the advice to remove the flag if Omit is true.
func (a UnsupportedFlag) Error() string {
	if a.Omit {
		return a.Reason + "; leave the flag out"
	}
	return a.Reason
}

// Unsupported returns the reason for which Watershed does not support a kube-apiserver flag. ok is false for any other
// name. Families of flags match by prefix, so any name that begins with "peer-" matches.
func Unsupported(name string) (UnsupportedFlag, bool) {
	if a, ok := unsupportedFlags[name]; ok {
		return a, true
	}
	for prefix, a := range unsupportedPrefixes {
		if strings.HasPrefix(name, prefix) {
			return a, true
		}
	}
	return UnsupportedFlag{}, false
}

const (
	only136    = "only Kubernetes 1.36 itself is served"
	ringBytes  = "the watch cache bounds events by size: --watch-ring-bytes"
	ownLogs    = "logs are written as they come, unbuffered, to one stream"
	ownMetrics = "all metrics are exposed, and no filter exists"
	ownHealth  = "the timeout of health checks of etcd is fixed"
	noPeers    = "every gateway serves every resource and proxies to no other gateway"
)

// unsupportedPrefixes maps the prefix of a family of unsupported flags to its reason.
var unsupportedPrefixes = map[string]UnsupportedFlag{
	"coordinated-leadership-": {Reason: "coordinated leader election is not offered", Omit: true},
	"log-json-":               {Reason: ownLogs, Omit: true},
	"log-text-":               {Reason: ownLogs, Omit: true},
	"peer-":                   {Reason: noPeers, Omit: true},
}

var unsupportedFlags = map[string]UnsupportedFlag{
	"allow-metric-labels":          {Reason: ownMetrics, Omit: true},
	"allow-metric-labels-manifest": {Reason: ownMetrics, Omit: true},
	"apiserver-count": {
		Reason: "the elected registry reconciles the endpoints of the kubernetes Service", Omit: true,
	},
	"cert-dir": {
		Reason: "missing certificates are created in --data-dir; set --tls-cert-file and --tls-private-key-file",
	},
	"contention-profiling":         {Reason: "contention is not profiled", Omit: true, NoopValue: "false"},
	"debug-socket-path":            {Reason: "--debug-address accepts the path of a socket"},
	"default-watch-cache-size":     {Reason: ringBytes},
	"delete-collection-workers":    {Reason: "objects are deleted one at a time", Omit: true, NoopValue: "1"},
	"disable-http2-serving":        {Reason: "HTTP/2 is always served", Omit: true, NoopValue: "false"},
	"disabled-metrics":             {Reason: ownMetrics, Omit: true},
	"emulated-version":             {Reason: only136, Omit: true},
	"emulation-forward-compatible": {Reason: only136, Omit: true, NoopValue: "false"},
	"enable-garbage-collector": {
		Reason: "deletion always supports kube-controller-manager's garbage collector", Omit: true,
		NoopValue: "true",
	},
	"enable-logs-handler": {Reason: "/logs is not served", Omit: true, NoopValue: "false"},
	"endpoint-reconciler-type": {
		Reason: "the elected registry reconciles the endpoints of the kubernetes Service", Omit: true,
		NoopValue: "lease",
	},
	"etcd-count-metric-poll-period": {Reason: ownMetrics, Omit: true},
	"etcd-db-metric-poll-interval":  {Reason: ownMetrics, Omit: true},
	"etcd-healthcheck-timeout":      {Reason: ownHealth, Omit: true},
	"etcd-readycheck-timeout":       {Reason: ownHealth, Omit: true},
	"etcd-servers-overrides": {
		Reason:          "all resources are in one etcd: objects in another etcd cannot be read",
		BlocksMigration: true,
	},
	"kubernetes-service-node-port": {
		Reason: "the kubernetes Service has a cluster IP", Omit: true,
		NoopValue: "0",
	},
	"lease-reuse-duration-seconds": {
		Reason: "an etcd lease is reused for 60 s; the time is fixed", Omit: true,
		NoopValue: "60",
	},
	"livez-grace-period":        {Reason: "/livez does not wait for start hooks", Omit: true},
	"log-flush-frequency":       {Reason: ownLogs, Omit: true},
	"min-compatibility-version": {Reason: only136, Omit: true},
	"permit-address-sharing": {
		Reason: "use --permit-port-sharing for several gateways at one address", Omit: true,
		NoopValue: "false",
	},
	"runtime-config-emulation-forward-compatible": {Reason: only136, Omit: true, NoopValue: "false"},
	"show-hidden-metrics-for-version":             {Reason: ownMetrics, Omit: true},
	"shutdown-send-retry-after": {
		Reason: "connections are closed as requests on them end", Omit: true,
		NoopValue: "false",
	},
	"storage-backend": {Reason: "etcd 3 is the only storage backend", Omit: true, NoopValue: "etcd3"},
	"storage-initialization-timeout": {
		Reason: "startup has no timeout; the log names each pending dependency", Omit: true,
	},
	"tls-curve-preferences": {Reason: "the curves are Go's own", Omit: true},
	"watch-cache":           {Reason: "the watch cache is always enabled", Omit: true, NoopValue: "true"},
	"watch-cache-sizes":     {Reason: ringBytes},
}
