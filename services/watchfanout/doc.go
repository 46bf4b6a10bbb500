// Package watchfanout serves LIST and WATCH from encoded bytes. A replica reads the event log and caches the objects of
// the resources that clients read. It writes responses without decoding objects. It calls only registry: for discovery,
// the first snapshot of a resource, the current revision, and encodings that it does not have (another version, Table
// rows).
//
// A replica becomes ready when it has received discovery and has read the log up to etcd's revision at its start. The
// first reader of a resource loads it. Sweep drops a resource that has had no reader for --cache-idle-timeout. The ring
// of each resource caches recent events, up to --watch-ring-bytes. A watch that resumes from before the ring reads the
// log (a backfill).
//
// Every second, a replica compares its revision with etcd's. If the log has not delivered etcd's events for 4 s and
// does not advance, the replica is stale. A stale replica rejects calls and ends its streams, so that the gateways
// resume on another replica. While registry is unreachable the replica cannot compare, and continues to serve.
//
// A replica keeps nothing on disk, and any replica may be killed. The gateways resume on another replica after the last
// position that they received. SIGTERM ends the streams first.
//
// Goroutines: one goroutine of logreader applies the log to the cache (Cache.Apply). Each stream runs in its gRPC
// handler's goroutine. Loads and backfills run in goroutines of their own, which a timeout bounds. Run starts the other
// tasks, and waits for them.
//
// # Review notes
//
// Check in every change:
//   - Bounds. Each buffer has a limit in bytes: rings, backfills, backfill pieces, bytes in flight by owner, encodings,
//     compressed runs, pinned snapshots.
//   - Order. Cache.Apply applies an event to its resource before it stores progress. A reader loads progress before it
//     locks the resource.
//   - Epochs. Code that compares two revisions from different moments also compares their epochs, because a restored
//     etcd repeats revisions.
//   - Positions. A message carries the position of its last event, never the watcher's next one. A gateway resumes from
//     it.
//
// Never:
//   - Decode an object here. watchfanout imports nothing of k8s.io/api; test/rules enforces it.
//   - Hold a lock, a backfill or a ring event while a client reads slowly. A slow stream may hold one piece or two
//     messages.
//   - Serve a resource that discovery has not delivered yet. The caller's permission may be for a different definition.
//
// Why the obvious alternatives fail:
//   - One channel per watch: each slow client needs a buffer of its own. A cursor into a shared ring costs one integer.
//   - Failing a list when the log stalls: registry can serve it from etcd, so the replica returns rpc.ErrDelegate.
//   - Compressing a list as a whole: one changed object invalidates everything. Content-defined runs limit that to the
//     neighbours.
//   - Counting large messages per stream: an owner with thousands of streams would fill the memory. The quota is per
//     owner.
package watchfanout
