// Package registry implements the registry service, which stores and serves the objects of a cluster.
//
// A registry runs the REST handlers over storage, publishes the event log, and runs the controllers that kube-apiserver
// runs itself. It is the only service with a connection to etcd, and it calls no other service. If a write needs
// admission or authorization, the registry sends callbacks in the write's stream, and the gateway calls admission and
// authz.
//
// Every replica serves four contracts:
//
//   - Objects, to the gateway: the verbs.
//   - Source, to the watch tier: snapshots, revisions, the log, conversions.
//   - Discovery, to both: the served resources and OpenAPI.
//   - InternalWatch, to the gateway for authn, authz and admission, which decide by these reads.
//
// Two tasks run on a single replica each, elected by leased keys in etcd: the publisher of the event log, and the
// controllers. A full etcd grants no lease. Every replica then runs the controllers, and a replica publishes without a
// lease.
//
// Upstream's allocators and controllers use informers. These go through the loopback, a client-go transport that calls
// the handlers directly. Its watches and InternalWatch read the registry's watch cache: the library
// platform/watchcache with events only.
//
// Service.Run starts a goroutine per task: etcd, encryption, publisher, log, verify, controllers and discovery.
// lifecycle.Supervisor restarts a task that ends or panics. The other goroutines belong to informers, to RPCs and to
// the packages of these tasks.
//
// If etcd is unavailable, all calls except Discovery fail with 503. If NATS is unavailable, writes and consistent lists
// continue. Events then wait in etcd's history.
//
// # Review notes
//
// A reviewer checks that:
//
//   - etcd serves a single watch, the publisher's. Election candidates poll, the publisher compacts, and informers use
//     the loopback. Upstream's compactor is off because it holds a watch (storage.Open, test/e2e/split_test.go).
//   - A read that combines objects with a CRD reads etcd's revision first. A CRD that changes in between is then in the
//     log after that revision (source.Snapshot, internalwatch.objects).
//   - A write that needs a callback under WriteUnary stores nothing. Reviews report a failed callback in their status,
//     so WriteUnary refuses their groups up front.
//   - A discovery response shares its APIResources with the previous response. delta compares pointers, so code must
//     not change a published APIResource.
//   - The index of a reset depends only on the event's index in its transaction. A publisher that resumes in the middle
//     of a transaction then publishes the same messages.
//   - The loopback does not pass on the callbacks of the write that called it.
//
// Never:
//
//   - Append to the log without the expected ID of the previous message, or retry an append. JetStream refuses the
//     message of a deposed publisher only by this ID. A failed append ends the term, and the next term reads the end of
//     the log.
//   - Compact a revision that is not in the log yet, or rotate the fencing token within a transaction.
//   - Rename the keys below /watershed/ in etcd or the JSON names of the epoch. Replicas of two releases share them in
//     a rolling upgrade. With two election keys two replicas would lead. Another JSON name starts a new epoch, so all
//     clients list again.
//   - Return a value of the write cache to a client: it may be old.
//   - Put objects from the log into the response cache: an older release may have encoded them.
//   - Cache a response of a resource with encrypted objects. A registry that lost the key would serve it from memory.
//   - Serve InternalWatch from the watch tier. A compromised replica could grant itself any permission.
//
// Alternatives that failed:
//
//   - The leased election as the only fence: a leader can lose its lease without noticing, for example in a long pause.
//     Hence the chain of message IDs, and transactions on the epoch's record.
//   - Revisions to recognize a restored etcd: new writes can pass the log's last revision before a publisher checks.
//     Hence the fencing token, written to the log before etcd.
//   - A log that begins at etcd's current revision: all clients from before received 410 and listed again. Hence the
//     backfill and the refill from etcd's history.
//   - JetStream consumers of the readers: a stolen key of the watch tier could create consumers until JetStream refused
//     all others. Hence ReadLog with direct gets, and its limits per peer.
//   - Immediate responses to progress requests: a reader that requests in a loop made etcd respond as fast as it could.
//     Hence the pace of 2 ms.
//   - Trace contexts without a wait: the event reached the publisher first and lost its trace. Hence up to 100 ms.
//   - Gateways counted by Leases of the API: any user with write access could shrink every gateway's share of seats.
//   - Decryption of every event without a backoff: a KMS that hangs delayed the events of all resources.
package registry
