// Package registry owns the objects of a cluster: the verbs over storage, the catalog of what is served, the event
// log's publisher and the loops that keep a fresh cluster as kube-apiserver would. It alone speaks to etcd, and it
// calls no other service: what a write needs to know of admission and authorization it asks back in the write's stream.
//
// Every replica answers (objects, source, catalog, policy); one, elected through etcd, publishes, and one runs the
// loops. Both elections are by a leased key. A publisher that lost its election without noticing can do no harm: each
// message of the log expects the one before it.
//
// What it offers is four contracts: Objects to the gateway, Source to the watch tier, Catalog to both, and
// Policy to the gateway on behalf of authn, authz and admission, which decide by what they read and believe no replica
// of the watch tier.
//
// Its own informers, which upstream's allocators and controllers are written against, go through the loopback: a client
// whose requests are the verbs and whose watches read the tail of the event log.
//
// When etcd is away, everything fails with 503 but the catalog; when NATS is, writes and consistent lists go on, and
// events wait.
package registry
