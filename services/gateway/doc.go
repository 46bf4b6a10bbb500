// Package gateway serves the Kubernetes API to clients: TLS, the filter chain, discovery, OpenAPI, and the routing of
// every request to another service. It does not store objects, authenticate, authorize or run admission plugins. It
// keeps no state that a client would miss at another gateway.
//
// The gateway is the only orchestrator. It gets the user of a request from authn, the decision from authz, and the
// verdict on a write from admission. Lists and watches go to the watch tier (all watchfanout replicas), the rest to
// registry. Only clients call the gateway. The services authn, authz and admission are clients too, each with its own
// identity.
//
// These caches and buffers are bounded in bytes: responses of authn and authz (delegatedauth), bodies in flight (body),
// and recent events of shared streams (watch). The gateway also caches the discovery view and the discovery and OpenAPI
// documents.
//
// If another service is unavailable, the gateway rejects requests with 503 and Retry-After. There are two exceptions.
// The registry answers lists if the watch tier cannot. Open watches wait for a replica and resume. The page /readyz
// names each unavailable service.
//
// # Goroutines
//
// Service.Run owns all goroutines that last. Each of these tasks has its own goroutine until its context ends.
//
//	discovery.Watcher.Run            the stream of served resources from registry; calls views.publish.
//	routing.AdmissionRules.Run       the stream of admission rules from admission.
//	delegatedauth.Authorizer.Run     the stream of policy revisions from authz, and its heartbeat timer.
//	aggregation.DiscoveryManager.Run discovery of aggregated API servers, every minute, on a goroutine for each.
//	Service.awaitStart               the first success of each check of the start, then the check of etcd each second.
//	flowcontrol.Fairness.Run         API Priority and Fairness, if it is enabled.
//	reload.Files.Run                 files that are reloaded when they change.
//
// The server owns its connections and their goroutines (package server). An audit backend in batch mode owns its own
// goroutine until Auditor.Close.
//
// # Life of a gateway
//
//	New ──► not ready ──► ready ──► shutting down ──► stopped.
//
//	not ready      a check of the start has not yet succeeded once (awaitStart), or the server does not listen.
//	ready          server.Server serves; the API's /readyz may still fail later if a service is unavailable. While
//	               etcd does not respond, the gateway serves and is not ready.
//	shutting down  SIGTERM: /readyz fails, --shutdown-delay-duration passes, new connections are refused,
//	               requests finish, watches end over --shutdown-watch-termination-grace-period. Watches from within
//	               the process stay, so that its informers are fresh for the last requests.
//	stopped        the audit log is flushed (audit.FlushTimeout at most), then the tasks end.
//
// The server listens early, as kube-apiserver does: authn, authz and admission read the cluster through it. With
// --permit-port-sharing it first waits until it can serve (joinable), because the other gateways of the port do serve.
// It does not wait for the policies of authn, authz and admission, because they read them through a gateway. It waits
// for flow control for fairnessWait at most, because flow control writes through admission.
//
// The order of the shutdown is kube-apiserver's.
//
// # Review notes
//
// A reviewer must check the following.
//
//   - Every call to another service has a deadline or ends with the client's request. A replica may be frozen and keep
//     its connections.
//   - Every cache and buffer has a bound in bytes, and a bound for each user.
//   - A metric's labels contain only served resources. A path, or a resource from a path, is the client's choice and
//     would stay in memory (metricsInfo).
//   - Error texts are kube-apiserver's, byte for byte. Built-in and custom resources differ (routing.dialect).
//   - A response that fails after its first byte must end as aborted (http.ErrAbortHandler or responsewriters.Abort).
//     Otherwise a client takes half a list for a complete list.
//   - A change of the order of filters is compared with kube-apiserver's DefaultBuildHandlerChain.
//
// A change must never do the following.
//
//   - Never serve a read of authn, authz or admission from the watch tier (routing.requestContext.isInternal). A
//     replica could forge a permission, or keep a revoked permission.
//   - Never cache a refused authentication or an anonymous user (delegatedauth). Unauthenticated clients could evict
//     the cached logins of others. An anonymous user may also be allowed for some paths only.
//   - Never hedge or retry a write, because a registry that does not respond may have written it. Write follows
//     WriteUnary only if the registry wrote nothing (callback_required). See rpc.NonIdempotent.
//   - Never wait for a ready connection in Authorizer.Run. The gateway must notice within heartbeatTimeout that authz
//     is unavailable.
//   - Never send admission the SubjectAccessReview that admission itself creates, because it may recurse without end
//     (routing.requestContext.isSelfReview).
//
// These obvious alternatives failed.
//
//   - An upgraded connection with the request's context: upgrades to aggregated servers ended at --request-timeout,
//     unlike in kube-apiserver. Without any context, a backend that never responds kept the connection and its
//     goroutines after the client left (package upgrade).
//   - Cancelling an OpenAPI document with its last client: clients that gave up and returned made the registry start
//     again each time (openapi.New).
//   - Reading the etag of an aggregated server's document on each request: a document has up to 16 MB, so digests are
//     computed once for each refresh.
//   - Rejecting a watch with a list that has the client's selectors: if nothing matched, the registry read the whole
//     resource, outside the bound of lists. Twelve such watches took 1.5 GB (routing.requestContext.watchRefusal).
//   - Decoding an aggregated server's response with a bound in bytes only: three bytes of JSON become a struct of
//     hundreds of bytes. Responses have a bound in JSON values too (aggregation.responseLimit).
//   - kube-apiserver's queue of audit events, bounded in events only: 10,000 events with objects are gigabytes
//     (kubernetes 85489).
//   - A flow control client that authz authorizes: an authz of an older release does not know its user, and the gateway
//     would wait for it. The loopback client has an authorizer of its own.
//   - Counting gateways by Leases in kube-system: anyone with write access to these Leases could shrink every gateway's
//     share of seats. The registry counts gateways under leased keys in etcd.
package gateway
