package config

import "strings"

// Absent is why a flag of kube-apiserver's has no equal here.
type Absent struct {
	// Why says what there is instead, or that there is nothing.
	Why string
	// Leave says that the flag is to be left out, and nothing is to be done in its place.
	Leave bool
	// Neutral is the value with which nothing is missed; empty: there is none.
	Neutral string
	// Blocks says that a cluster that was served with the flag cannot be served without it.
	Blocks bool
}

// Error is Why, with what to do.
func (a Absent) Error() string {
	if a.Leave {
		return a.Why + "; leave the flag out"
	}
	return a.Why
}

// AbsentFlag is why kube-apiserver's flag of that name is not offered; false for names that are no such flag's. Of
// families it knows the beginning alone: --audit-anything.
func AbsentFlag(name string) (Absent, bool) {
	if a, ok := absent[name]; ok {
		return a, true
	}
	for prefix, a := range absentFamilies {
		if strings.HasPrefix(name, prefix) {
			return a, true
		}
	}
	return Absent{}, false
}

const (
	only136    = "only Kubernetes 1.36 itself is served"
	ringBytes  = "the watch tier keeps events by size: --watch-ring-bytes"
	ownLogs    = "logs are written as they come, to one stream"
	ownMetrics = "metrics are all shown, as they are"
	ownHealth  = "how long a health check waits for etcd is fixed"
	noPeers    = "every gateway serves everything, and asks no other one"
)

// absentFamilies are flags that are absent together, by how their names begin.
var absentFamilies = map[string]Absent{
	"coordinated-leadership-": {Why: "coordinated leader election is not offered", Leave: true},
	"log-json-":               {Why: ownLogs, Leave: true},
	"log-text-":               {Why: ownLogs, Leave: true},
	"peer-":                   {Why: noPeers, Leave: true},
}

var absent = map[string]Absent{
	"allow-metric-labels":          {Why: ownMetrics, Leave: true},
	"allow-metric-labels-manifest": {Why: ownMetrics, Leave: true},
	"apiserver-count": {
		Why: "the elected registry alone keeps the endpoints of the kubernetes Service", Leave: true,
	},
	"cert-dir": {
		Why: "certificates that are not given are made in --data-dir; --tls-cert-file and --tls-private-key-file give them",
	},
	"contention-profiling":         {Why: "contention is not profiled", Leave: true, Neutral: "false"},
	"debug-socket-path":            {Why: "--debug-address takes the path of a socket"},
	"default-watch-cache-size":     {Why: ringBytes},
	"delete-collection-workers":    {Why: "a collection is deleted one by one", Leave: true, Neutral: "1"},
	"disable-http2-serving":        {Why: "HTTP/2 is always served", Leave: true, Neutral: "false"},
	"disabled-metrics":             {Why: ownMetrics, Leave: true},
	"emulated-version":             {Why: only136, Leave: true},
	"emulation-forward-compatible": {Why: only136, Leave: true, Neutral: "false"},
	"enable-garbage-collector": {
		Why: "objects are always deleted in the way that kube-controller-manager's garbage collector expects", Leave: true,
		Neutral: "true",
	},
	"enable-logs-handler": {Why: "/logs is not served", Leave: true, Neutral: "false"},
	"endpoint-reconciler-type": {
		Why: "the elected registry alone keeps the endpoints of the kubernetes Service", Leave: true,
		Neutral: "lease",
	},
	"etcd-count-metric-poll-period": {Why: ownMetrics, Leave: true},
	"etcd-db-metric-poll-interval":  {Why: ownMetrics, Leave: true},
	"etcd-healthcheck-timeout":      {Why: ownHealth, Leave: true},
	"etcd-readycheck-timeout":       {Why: ownHealth, Leave: true},
	"etcd-servers-overrides": {
		Why:    "everything is in one etcd: what is in another cannot be read",
		Blocks: true,
	},
	"kubernetes-service-node-port": {
		Why: "the kubernetes Service has a cluster IP", Leave: true,
		Neutral: "0",
	},
	"lease-reuse-duration-seconds": {
		Why: "how long a lease of etcd is shared is fixed to 60 s", Leave: true,
		Neutral: "60",
	},
	"livez-grace-period":        {Why: "/livez does not wait for start hooks", Leave: true},
	"log-flush-frequency":       {Why: ownLogs, Leave: true},
	"min-compatibility-version": {Why: only136, Leave: true},
	"permit-address-sharing": {
		Why: "--permit-port-sharing has several gateways listen at one address", Leave: true,
		Neutral: "false",
	},
	"runtime-config-emulation-forward-compatible": {Why: only136, Leave: true, Neutral: "false"},
	"show-hidden-metrics-for-version":             {Why: ownMetrics, Leave: true},
	"shutdown-send-retry-after": {
		Why: "connections are closed as requests on them end", Leave: true,
		Neutral: "false",
	},
	"storage-backend": {Why: "etcd 3 is the only one", Leave: true, Neutral: "etcd3"},
	"storage-initialization-timeout": {
		Why: "a start waits for as long as it takes, and says for what", Leave: true,
	},
	"tls-curve-preferences": {Why: "the curves are Go's own", Leave: true},
	"watch-cache":           {Why: "the watch tier is always there", Leave: true, Neutral: "true"},
	"watch-cache-sizes":     {Why: ringBytes},
}
