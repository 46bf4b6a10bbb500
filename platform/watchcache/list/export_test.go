package list

// Seed sets the seed of run boundaries, so that each run of a test has the same.
func (l *Server) Seed(seed uint64) { l.runs.seed = seed }
