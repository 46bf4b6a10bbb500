package storage

// SetLatestRevision sets the latest revision that etcd has returned.
func (s *Storage) SetLatestRevision(revision int64) { s.latestRevision.Store(revision) }

// OldDataKeys returns the data keys of a release that kept them outside of the prefix.
func OldDataKeys(s *Storage) *DataKeys {
	keys := NewDataKeys(s, "", 0)
	keys.prefix = oldDataKeys
	return keys
}

// MarshalJSON and IsFieldSet are internal functions.
var (
	MarshalJSON = marshalJSON
	IsFieldSet  = isFieldSet
)
