// Package gateway is the way in: TLS, the filters, discovery, and the routing of every request to the service that
// answers it. It keeps no state that another gateway would miss.
//
// It is the only orchestrator: it asks authn who a request is of, authz whether they may, admission about what is
// written, the watch tier for lists and watches, and registry for everything else. Nobody calls it but clients; authn,
// authz and admission are among them, with identities of their own.
//
// What it keeps in memory, all of it bounded in bytes: answers of authn and authz for as long as those say (access),
// bodies of requests in flight (body), recent events of the streams that clients share (watch), the catalog, and
// documents of discovery and OpenAPI.
//
// When another service is away: requests are refused with 503 and Retry-After, but for lists, which registry answers in
// the watch tier's place, and open watches, which wait and then go on. /readyz names what cannot be asked.
//
// It is told to stop by SIGTERM and stops in kube-apiserver's order: not ready, --shutdown-delay-duration, no new
// connections, requests end by themselves, watches over --shutdown-watch-termination-grace-period.
package gateway
