package storage

// SetLatestRevision has the storage take a revision for one that etcd has told it.
func (s *Storage) SetLatestRevision(revision int64) { s.latestRevision.Store(revision) }
