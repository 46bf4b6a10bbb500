package storage

// Told has the storage take a revision for one that etcd has told it.
func (s *Storage) Told(revision int64) { s.newest.Store(revision) }
