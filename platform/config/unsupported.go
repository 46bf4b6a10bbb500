package config

import "strings"

// UnsupportedFlag is why a flag of kube-apiserver's has no equal here.
type UnsupportedFlag struct {
	// Reason says what there is instead, or that there is nothing.
	Reason string
	// Omit says that the flag is to be left out, and nothing is to be done in its place.
	Omit bool
	// NoopValue is the value with which nothing is missed; empty: there is none.
	NoopValue string
	// BlocksMigration says that a cluster that was served with the flag cannot be served without it.
	BlocksMigration bool
}

// Error is Why, with what to do.
func (a UnsupportedFlag) Error() string {
	if a.Omit {
		return a.Reason + "; leave the flag out"
	}
	return a.Reason
}

// Unsupported is why kube-apiserver's flag of that name is not offered; false for names that are no such flag's. Of
// families it knows the beginning alone: --audit-anything.
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
	ringBytes  = "the watch tier keeps events by size: --watch-ring-bytes"
	ownLogs    = "logs are written as they come, to one stream"
	ownMetrics = "metrics are all shown, as they are"
	ownHealth  = "how long a health check waits for etcd is fixed"
	noPeers    = "every gateway serves everything, and asks no other one"
)

// unsupportedPrefixes are flags that are absent together, by how their names begin.
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
		Reason: "the elected registry alone keeps the endpoints of the kubernetes Service", Omit: true,
	},
	"cert-dir": {
		Reason: "certificates that are not given are made in --data-dir; --tls-cert-file and --tls-private-key-file give them",
	},
	"contention-profiling":         {Reason: "contention is not profiled", Omit: true, NoopValue: "false"},
	"debug-socket-path":            {Reason: "--debug-address takes the path of a socket"},
	"default-watch-cache-size":     {Reason: ringBytes},
	"delete-collection-workers":    {Reason: "a collection is deleted one by one", Omit: true, NoopValue: "1"},
	"disable-http2-serving":        {Reason: "HTTP/2 is always served", Omit: true, NoopValue: "false"},
	"disabled-metrics":             {Reason: ownMetrics, Omit: true},
	"emulated-version":             {Reason: only136, Omit: true},
	"emulation-forward-compatible": {Reason: only136, Omit: true, NoopValue: "false"},
	"enable-garbage-collector": {
		Reason: "objects are always deleted in the way that kube-controller-manager's garbage collector expects", Omit: true,
		NoopValue: "true",
	},
	"enable-logs-handler": {Reason: "/logs is not served", Omit: true, NoopValue: "false"},
	"endpoint-reconciler-type": {
		Reason: "the elected registry alone keeps the endpoints of the kubernetes Service", Omit: true,
		NoopValue: "lease",
	},
	"etcd-count-metric-poll-period": {Reason: ownMetrics, Omit: true},
	"etcd-db-metric-poll-interval":  {Reason: ownMetrics, Omit: true},
	"etcd-healthcheck-timeout":      {Reason: ownHealth, Omit: true},
	"etcd-readycheck-timeout":       {Reason: ownHealth, Omit: true},
	"etcd-servers-overrides": {
		Reason:          "everything is in one etcd: what is in another cannot be read",
		BlocksMigration: true,
	},
	"kubernetes-service-node-port": {
		Reason: "the kubernetes Service has a cluster IP", Omit: true,
		NoopValue: "0",
	},
	"lease-reuse-duration-seconds": {
		Reason: "how long a lease of etcd is shared is fixed to 60 s", Omit: true,
		NoopValue: "60",
	},
	"livez-grace-period":        {Reason: "/livez does not wait for start hooks", Omit: true},
	"log-flush-frequency":       {Reason: ownLogs, Omit: true},
	"min-compatibility-version": {Reason: only136, Omit: true},
	"permit-address-sharing": {
		Reason: "--permit-port-sharing has several gateways listen at one address", Omit: true,
		NoopValue: "false",
	},
	"runtime-config-emulation-forward-compatible": {Reason: only136, Omit: true, NoopValue: "false"},
	"show-hidden-metrics-for-version":             {Reason: ownMetrics, Omit: true},
	"shutdown-send-retry-after": {
		Reason: "connections are closed as requests on them end", Omit: true,
		NoopValue: "false",
	},
	"storage-backend": {Reason: "etcd 3 is the only one", Omit: true, NoopValue: "etcd3"},
	"storage-initialization-timeout": {
		Reason: "a start waits for as long as it takes, and says for what", Omit: true,
	},
	"tls-curve-preferences": {Reason: "the curves are Go's own", Omit: true},
	"watch-cache":           {Reason: "the watch tier is always there", Omit: true, NoopValue: "true"},
	"watch-cache-sizes":     {Reason: ringBytes},
}
