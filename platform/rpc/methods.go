package rpc

import discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"

// AllowedClients names, for every method that a service offers, the services that may call it: the common names of their
// certificates on the inner network. What is not here may be called by nobody. docs/security.md is made from it, and a
// test holds it against the contracts.
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

	"/watershed.registry.v1.Discovery/Watch":    {"gateway", "watchfanout"},
	"/watershed.registry.v1.Discovery/OpenAPI":  {"gateway"},
	"/watershed.registry.v1.Discovery/Gateways": {"gateway"},

	"/watershed.registry.v1.Source/Snapshot": {"watchfanout"},
	"/watershed.registry.v1.Source/Encode":   {"watchfanout"},
	"/watershed.registry.v1.Source/Revision": {"watchfanout", "gateway"},
	"/watershed.registry.v1.Source/DataKey":  {"watchfanout"},
	"/watershed.registry.v1.Source/ReadLog":  {"watchfanout"},

	"/watershed.watchfanout.v1.Watch/Get":   {"gateway"},
	"/watershed.watchfanout.v1.Watch/List":  {"gateway"},
	"/watershed.watchfanout.v1.Watch/Watch": {"gateway"},

	"/watershed.watchfanout.v1.InternalWatch/List":  {"gateway"},
	"/watershed.watchfanout.v1.InternalWatch/Watch": {"gateway"},

	discovery.AggregatedDiscoveryService_StreamAggregatedResources_FullMethodName: {"gateway", "watchfanout"},
}

// NonIdempotent names the methods whose calls are never sent twice: a replica that was lost before it answered may have written.
// All others may be sent again.
var NonIdempotent = []string{
	"/watershed.registry.v1.Objects/Write",
	"/watershed.registry.v1.Objects/WriteUnary",
}

// EndOnDrain names the streams that a server ends as soon as it drains: they would go on for as long as their caller
// wants, and lose nothing when another replica goes on with them. A watch of the watch tier is none: it says first how
// far it has come.
var EndOnDrain = []string{
	"/watershed.authz.v1.Authz/PolicyRevisions",
	"/watershed.admission.v1.Admission/AdmissionRules",
	"/watershed.registry.v1.Discovery/Watch",
	"/watershed.watchfanout.v1.InternalWatch/Watch",
}
