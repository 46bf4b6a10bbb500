package lists

// Seed has the same keys end runs in each run of a test.
func (l *Lists) Seed(seed uint64) { l.runs.seed = seed }
