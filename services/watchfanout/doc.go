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
// The library platform/watchcache does the work. This package assembles it, and adds the status page and metrics.
//
// Goroutines: one goroutine of logreader applies the log to the cache (Cache.Apply). Each stream runs in its gRPC
// handler's goroutine. Loads and backfills run in goroutines of their own, which a timeout bounds. Run starts the other
// tasks, and waits for them.
//
// # Review notes
//
// The library has its own review notes. Never:
//   - Serve a resource that discovery has not delivered yet. The caller's permission may be for a different definition.
//   - Fail a list when the log stalls. registry can serve it from etcd, so the replica returns rpc.ErrDelegate.
package watchfanout
