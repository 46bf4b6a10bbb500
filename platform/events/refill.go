package events

import logv1 "watershed.dev/proto/watershed/log/v1"

// IsRefill says whether a message begins a log that was lost again, from before what a reader has come to: of the same
// history of etcd and at revision at the latest. It leaves no gap, and what the reader has come to follows once more.
func IsRefill(e *logv1.Event, epoch string, revision int64) bool {
	return e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "" && e.Epoch != "" && e.Epoch == epoch &&
		e.Revision <= revision
}
