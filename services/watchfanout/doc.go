// Package watchfanout serves LIST and WATCH from encoded bytes. A replica reads the event log, keeps the objects of the
// resources that are asked for, and writes answers without ever decoding an object. It calls registry alone: for
// the catalog, for a first snapshot, for the current revision, and for what its bytes are not (another version, Table
// rows).
//
// A replica begins to serve when it has read the log to where etcd was when it started, and knows the catalog. It holds
// what is asked for: each resource is loaded by its first reader and dropped when nobody has read it for
// --cache-idle-timeout. Recent events are kept for each resource, up to --watch-ring-bytes; what a watch resumes from
// further back is read from the log.
//
// It compares itself with etcd every second. One that the log does not bring what etcd has, for four seconds, refuses
// calls and ends its streams, so that the gateways go on at another replica; while registry cannot be asked it cannot
// tell, and serves.
//
// It keeps nothing on disk. Any replica may be killed: the gateways go on at another, after the last position that they
// were sent. SIGTERM ends the streams first.
package watchfanout
