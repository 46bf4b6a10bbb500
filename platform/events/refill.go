package events

import logv1 "watershed.dev/proto/watershed/log/v1"

// Refills says whether a message begins a log that was lost again, from before what a reader has come to: of the same
// history of etcd and at revision at the latest. It leaves no gap, and what the reader has come to follows once more.
func Refills(e *logv1.Event, history string, revision int64) bool {
	return e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "" && e.Epoch != "" && e.Epoch == history &&
		e.Revision <= revision
}
