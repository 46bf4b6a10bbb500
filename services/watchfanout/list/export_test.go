package list

// Seed has the same keys end runs in each run of a test.
func (l *Server) Seed(seed uint64) { l.runs.seed = seed }
