package events

import logv1 "watershed.dev/proto/watershed/log/v1"

// IsRefill returns true if a message begins a recreated log at or before a reader's revision, in the same epoch of
// etcd. Such a reset leaves no gap: the events up to the reader's revision follow again.
func IsRefill(e *logv1.Event, epoch string, revision int64) bool {
	return e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "" && e.Epoch != "" && e.Epoch == epoch &&
		e.Revision <= revision
}
