package publisher

import "time"

// SetStuckAfter sets the bound of a stream that rejects all messages, and returns a function that restores it.
func SetStuckAfter(d time.Duration) (restore func()) {
	before := stuckAfter
	stuckAfter = d
	return func() { stuckAfter = before }
}
