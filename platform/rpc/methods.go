package rpc

import (
	"slices"
	"strings"

	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

	"watershed.dev/platform/telemetry"
)

// AllowedClients maps every method to the services that may call it, by the common names of their certificates on the
// inner network. A method that is not in the map cannot be called, except health checks. Tests compare it with the
// contracts and with docs/operators/security.md.
var AllowedClients = map[string][]string{
	"/watershed.authn.v1.Authn/Authenticate":   {"gateway"},
	"/watershed.authn.v1.Authn/ReviewToken":    {"gateway"},
	"/watershed.authn.v1.Authn/IssuerDocument": {"gateway"},

	"/watershed.authz.v1.Authz/Authorize":       {"gateway"},
	"/watershed.authz.v1.Authz/Rules":           {"gateway"},
	"/watershed.authz.v1.Authz/PolicyRevisions": {"gateway"},

	"/watershed.admission.v1.Admission/Admit":          {"gateway"},
	"/watershed.admission.v1.Admission/Validate":       {"gateway"},
	"/watershed.admission.v1.Admission/AdmissionRules": {"gateway"},

	"/watershed.registry.v1.Objects/Get":        {"gateway"},
	"/watershed.registry.v1.Objects/List":       {"gateway"},
	"/watershed.registry.v1.Objects/Write":      {"gateway"},
	"/watershed.registry.v1.Objects/WriteUnary": {"gateway"},
	"/watershed.registry.v1.Objects/Connect":    {"gateway"},

	"/watershed.registry.v1.Discovery/Watch":      {"gateway", "watchfanout"},
	"/watershed.registry.v1.Discovery/OpenAPI":    {"gateway"},
	"/watershed.registry.v1.Discovery/Gateways":   {"gateway"},
	"/watershed.registry.v1.Discovery/StartHooks": {"gateway"},

	"/watershed.registry.v1.Discovery/GatewayReports": {"gateway"},

	"/watershed.registry.v1.Source/Snapshot": {"watchfanout"},
	"/watershed.registry.v1.Source/Encode":   {"watchfanout"},
	"/watershed.registry.v1.Source/Revision": {"watchfanout", "gateway"},
	"/watershed.registry.v1.Source/DataKey":  {"watchfanout"},
	"/watershed.registry.v1.Source/ReadLog":  {"watchfanout"},

	"/watershed.watchfanout.v1.Watch/List":    {"gateway"},
	"/watershed.watchfanout.v1.Watch/Watch":   {"gateway"},
	"/watershed.watchfanout.v1.Watch/Watches": {"gateway"},

	"/watershed.watchfanout.v1.InternalWatch/List":  {"gateway"},
	"/watershed.watchfanout.v1.InternalWatch/Watch": {"gateway"},

	"/watershed.process.v1.Processes/Report": {"gateway"},

	discovery.AggregatedDiscoveryService_StreamAggregatedResources_FullMethodName: {"gateway", "watchfanout"},
}

// Clients returns the services that may call any method with a prefix, such as /watershed.authn.v1.Authn/.
func Clients(prefix string) (services []string) {
	for method, clients := range AllowedClients {
		if strings.HasPrefix(method, prefix) {
			services = append(services, clients...)
		}
	}
	slices.Sort(services)
	return slices.Compact(services)
}

// NonIdempotent lists the methods whose calls are never sent twice, because a replica that was lost before it
// responded may have written. All other methods may be retried.
var NonIdempotent = []string{
	"/watershed.registry.v1.Objects/Write",
	"/watershed.registry.v1.Objects/WriteUnary",
}

// EndOnDrain lists the streams that a server ends as soon as it drains. They would otherwise last as long as their
// clients, and another replica can continue them without loss. Watches of the watch tier are not listed, because
// watchfanout sends their position before it ends them.
var EndOnDrain = []string{
	"/watershed.authz.v1.Authz/PolicyRevisions",
	"/watershed.admission.v1.Admission/AdmissionRules",
	"/watershed.registry.v1.Discovery/Watch",
	"/watershed.watchfanout.v1.InternalWatch/Watch",
}

// lasting lists the streams that last as long as their clients. Traffic does not count them.
var lasting = append([]string{
	"/watershed.watchfanout.v1.Watch/Watch",
	"/watershed.watchfanout.v1.Watch/Watches",
	discovery.AggregatedDiscoveryService_StreamAggregatedResources_FullMethodName,
}, EndOnDrain...)

// Traffic counts the RPCs that the process serves.
var Traffic telemetry.Traffic
