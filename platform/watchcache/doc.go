// Package watchcache documents the library of the watch cache. A process reads the event log into a cache, and serves
// watches and lists from encoded bytes. It decodes no objects. Two services link the library:
//
//   - watchfanout caches the objects and events of all resources (cache.New). It serves the reads of clients.
//   - registry caches events only (cache.NewEvents), and reads objects from etcd. It serves the reads of authn, authz
//     and admission, and of its own informers.
//
// With events only, a byte bound covers all resources together, and no frames are cached. A watch whose next event is
// gone expires. watch.Objects reads etcd.
//
// The packages, from the bottom up: cache, query, conversion and logreader, list and watch.
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
//   - Positions. A message carries the position of its last event, never the watcher's next. A gateway resumes from
//     it. A position within a transaction is before the end of its revision.
//   - Sizes. JSONSize and ProtobufSize need no bytes; JSON and Protobuf may decompress 128 KB.
//   - Delivery. No interface call, clock or lock per event and watch is added. BenchmarkDelivery measures it.
//
// Never:
//   - Cache a slice of an item's bytes: it keeps the bytes of all neighbours in memory.
//   - Decode an object here. The library imports nothing of k8s.io/api; test/rules enforces it.
//   - Hold a lock, a backfill or a ring event while a client reads slowly. A slow stream may hold a piece or two
//     messages.
//   - Start a goroutine or read etcd in Cache.Apply.
//
// Why the obvious alternatives fail:
//   - A channel per watch: each slow client needs a buffer of its own. A cursor into a shared ring costs an integer.
//   - Compressing a list as a whole: a changed object invalidates everything. Content-defined runs limit that to the
//     neighbours.
//   - Keeping every object as it is sent: most objects are not read for hours. Sweep packs them, and a reader unpacks a
//     pack of neighbours.
//   - Counting large messages per stream: an owner with thousands of streams would fill the memory. The quota is per
//     owner.
package watchcache
