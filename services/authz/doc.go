// Package authz says what a user may do, by upstream's own authorizers in the order of --authorization-mode or of an
// authorization configuration: Node, RBAC, ABAC, Webhook, AlwaysAllow, AlwaysDeny.
//
// It is called by the gateway alone. Each decision carries the policy's generation and, where no generation tells, for
// how long it may be kept; Generations streams what changes, by namespace, so that a permission that is taken away is
// gone from every gateway at once. The system's own services are decided by fixed rights (rights.go), which need
// nothing of the cluster.
//
// Policies it reads as a client of the gateway, with an identity of its own. While it does not know that they are fresh
// it decides nothing by them, and everybody but system:masters and the services is refused with 503.
package authz
