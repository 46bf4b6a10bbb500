package storage

// SetLatestRevision sets the latest revision that etcd has returned.
func (s *Storage) SetLatestRevision(revision int64) { s.latestRevision.Store(revision) }

// MarshalJSON and IsFieldSet are internal functions.
var (
	MarshalJSON = marshalJSON
	IsFieldSet  = isFieldSet
)
