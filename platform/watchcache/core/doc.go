// Package core decides the order of the event path: from etcd's watch to the log, and from the log to readers. It is
// deterministic, as etcd raft's RawNode is: callers give it results of reads as values, and take the messages and
// decisions as values. It has no goroutine, clock, lock or I/O. The callers (shells) own these.
//
//	etcd ──▶ services/registry/publisher ──▶ NATS JetStream ──▶ platform/eventlog ──▶ platform/watchcache/cache
//	              Publisher, Term, Chain                              Reader, Replay      Replica, Events, Horizon
//	platform/watchcache/cache ──▶ services/gateway/watch ──▶ clients
//	                              Broadcast, Receiver, Watch, Bucket
//
// testdata holds a transcript for each subject, which is the manual of this package. TestSchedules drives all parts
// together, with random faults, except Replay.Request and Replay.Chunk (TestAReplayNoticesAnotherEnd).
//
// Review notes:
//
//   - A message expects its predecessor's ID. No code may publish a message beside the chain, or repeat an append.
//     After a failed append, the next term reads the end of the log.
//   - The next fencing token must be in the log before it is in etcd. Otherwise a crash between the two leaves a token
//     in etcd that the log does not know, and a publisher cannot distinguish etcd from a restored etcd.
//   - The index of a reset depends only on its event. A publisher that takes over within a transaction must produce the
//     same messages, or readers apply a transaction that never was.
//   - A receiver must not drop or repeat an event. Every transition keeps cursor, position and skipUntil consistent.
//   - An expected sequence instead of an ID was the obvious alternative. It fails if the stream loses its end and
//     another publisher fills it up to the same sequence.
package core
