// Package authz authorizes requests with upstream's own authorizers: Node, RBAC, ABAC, Webhook, AlwaysAllow,
// AlwaysDeny. Their order is --authorization-mode or an authorization configuration. It does not authenticate.
//
// Only the gateway calls it. Each decision has the policy revision that it was made at. If no revision covers the
// decision, it has a cache TTL instead. PolicyRevisions streams the changes by namespace, so that every gateway drops a
// revoked permission at once. Fixed rules (servicerules.go) decide for the system's own services, without any data of
// the cluster.
//
// authz reads the policies as a client of the gateway, with an identity of its own. While they are not fresh, it
// returns UNAVAILABLE, and the gateway responds 503. Only system:masters and the services are still decided.
//
// Goroutines: Run starts the file watcher and the informers, and ends them with its context. Informer handlers record
// policy revisions. Each request runs in its gRPC handler's goroutine.
//
// # Review notes
//
// Check in every change:
//   - The revision is read before the decision. A change during the decision then invalidates it.
//   - A decision is cacheable only if every authorizer that contributed follows policy revisions: no webhook, no error,
//     no node.
//   - A wildcard decision holds for every name, or every namespace. TestWildcardDecisionsMatchThePolicy compares it
//     with the policy.
//   - serviceRules and docs/operators/security.md agree.
//
// Never:
//   - Decide from stale policies. A revoked permission would be granted.
//   - Send a policy revision on a stream while the policies are stale. The gateway would keep its cache.
//   - Change the reason texts of the service rules: test/differential compares them.
//   - Let RBAC decide for the system's services. They read the policies before policies exist.
//
// Why the obvious alternatives fail:
//   - Upstream's union as a whole: it does not report which authorizer decided, so a webhook's decision would be cached
//     by revision.
//   - One call per object name: a client that reads ten thousand objects would need ten thousand decisions. See
//     wildcard.
//   - TTLs for RBAC decisions: a revoked permission would remain until the TTL ends.
package authz
