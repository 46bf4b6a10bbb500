package config

import "strings"

// Absent is why a flag of kube-apiserver's has no equal here.
type Absent struct {
	// Why says what there is instead, or what to do.
	Why string
	// Neutral is the value with which nothing is missed; empty: there is none.
	Neutral string
	// Blocks says that a cluster that was served with the flag cannot be served without it.
	Blocks bool
}

// AbsentFlag is why kube-apiserver's flag of that name is not offered; false for names that kube-apiserver does not
// have either, or that are offered.
func AbsentFlag(name string) (Absent, bool) {
	if a, ok := absent[name]; ok {
		return a, true
	}
	for prefix, why := range absentFamilies {
		if strings.HasPrefix(name, prefix) {
			return Absent{Why: why}, true
		}
	}
	return Absent{}, false
}

const (
	only136    = "only Kubernetes 1.36 itself is served; leave the flag out"
	ringBytes  = "the watch tier keeps events by size: --watch-ring-bytes"
	leaveOut   = "; leave the flag out"
	ownLogs    = "logs are written as they come, to one stream" + leaveOut
	ownMetrics = "metrics are all shown, as they are" + leaveOut
	ownHealth  = "how long a health check waits for etcd is fixed" + leaveOut
	noEncrypt  = "encryption at rest is not offered: what is stored encrypted cannot be read"
	noPeers    = "every gateway serves everything, and asks no other one" + leaveOut
)

// absentFamilies are flags that are absent together, by how their names begin.
var absentFamilies = map[string]string{
	"audit-":                  "audit is not offered; requests are logged with --v=3, without bodies",
	"coordinated-leadership-": "coordinated leader election is not offered" + leaveOut,
	"log-json-":               ownLogs,
	"log-text-":               ownLogs,
	"peer-":                   noPeers,
}

var absent = map[string]Absent{
	"allow-metric-labels":          {Why: ownMetrics},
	"allow-metric-labels-manifest": {Why: ownMetrics},
	"apiserver-count": {
		Why: "the elected registry alone keeps the endpoints of the kubernetes Service" + leaveOut,
	},
	"cert-dir": {
		Why: "certificates that are not given are made in --data-dir; --tls-cert-file and --tls-private-key-file give them",
	},
	"contention-profiling":      {Why: "contention is not profiled" + leaveOut, Neutral: "false"},
	"debug-socket-path":         {Why: "--debug-address takes the path of a socket"},
	"default-watch-cache-size":  {Why: ringBytes},
	"delete-collection-workers": {Why: "a collection is deleted one by one" + leaveOut, Neutral: "1"},
	"disable-http2-serving":     {Why: "HTTP/2 is always served" + leaveOut, Neutral: "false"},
	"disabled-metrics":          {Why: ownMetrics},
	"egress-selector-config-file": {
		Why: "there is no egress selector; nodes, pods and webhooks are dialled from where the gateway, registry and admission run",
	},
	"emulated-version":             {Why: only136},
	"emulation-forward-compatible": {Why: only136, Neutral: "false"},
	"enable-garbage-collector": {
		Why:     "objects are always deleted in the way that kube-controller-manager's garbage collector expects" + leaveOut,
		Neutral: "true",
	},
	"enable-logs-handler": {Why: "/logs is not served" + leaveOut, Neutral: "false"},
	"enable-priority-and-fairness": {
		Why:     "API Priority and Fairness is not offered; --max-requests-inflight and --max-mutating-requests-inflight bound requests",
		Neutral: "false",
	},
	"encryption-provider-config":                  {Why: noEncrypt, Blocks: true},
	"encryption-provider-config-automatic-reload": {Why: noEncrypt, Neutral: "false"},
	"endpoint-reconciler-type": {
		Why:     "the elected registry alone keeps the endpoints of the kubernetes Service" + leaveOut,
		Neutral: "lease",
	},
	"etcd-count-metric-poll-period": {Why: ownMetrics},
	"etcd-db-metric-poll-interval":  {Why: ownMetrics},
	"etcd-healthcheck-timeout":      {Why: ownHealth},
	"etcd-readycheck-timeout":       {Why: ownHealth},
	"etcd-servers-overrides": {
		Why:    "everything is in one etcd: what is in another cannot be read",
		Blocks: true,
	},
	"external-hostname": {
		Why: "where the keys of tokens are --service-account-jwks-uri says" + leaveOut,
	},
	"kubernetes-service-node-port": {
		Why:     "the kubernetes Service has a cluster IP" + leaveOut,
		Neutral: "0",
	},
	"lease-reuse-duration-seconds": {
		Why:     "how long a lease of etcd is shared is fixed to 60 s" + leaveOut,
		Neutral: "60",
	},
	"livez-grace-period":        {Why: "/livez does not wait for start hooks" + leaveOut},
	"log-flush-frequency":       {Why: ownLogs},
	"min-compatibility-version": {Why: only136},
	"permit-address-sharing": {
		Why:     "--permit-port-sharing has several gateways listen at one address" + leaveOut,
		Neutral: "false",
	},
	"runtime-config-emulation-forward-compatible": {Why: only136, Neutral: "false"},
	"service-account-signing-endpoint": {
		Why:    "an external signer of tokens is not offered: those that it signed would be strangers'",
		Blocks: true,
	},
	"show-hidden-metrics-for-version": {Why: ownMetrics},
	"shutdown-send-retry-after": {
		Why:     "connections are closed as requests on them end" + leaveOut,
		Neutral: "false",
	},
	"storage-backend": {Why: "etcd 3 is the only one" + leaveOut, Neutral: "etcd3"},
	"storage-initialization-timeout": {
		Why: "a start waits for as long as it takes, and says for what" + leaveOut,
	},
	"tls-curve-preferences": {Why: "the curves are Go's own" + leaveOut},
	"watch-cache":           {Why: "the watch tier is always there" + leaveOut, Neutral: "true"},
	"watch-cache-sizes":     {Why: ringBytes},
}
