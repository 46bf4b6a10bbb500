package events

import "time"

// Aging finds the old entries of a Ring, which have no time of their own. The zero value is ready to use.
type Aging struct {
	// mark is the cursor after the entries that existed at the time at.
	mark int64
	at   time.Time
}

// Due reports whether a period has passed since Old last returned a cursor.
func (a *Aging) Due(now time.Time, period time.Duration) bool { return now.Sub(a.at) >= period }

// Old returns a cursor if it is due, and otherwise 0. The entries before the cursor are at least a period old. next is
// the ring's Next. With calls at short intervals, an entry is found at an age of at most two periods.
func (a *Aging) Old(now time.Time, period time.Duration, next int64) (old int64) {
	if a.Due(now, period) {
		old, a.mark, a.at = a.mark, next, now
	}
	return old
}
