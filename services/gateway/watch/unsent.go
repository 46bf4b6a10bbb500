package watch

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// unsentBytes bounds what all watches together hold for clients that have not taken it yet; unsentShare is one
	// user's share of it. Beyond the bound each user's share is leastShare.
	unsentBytes = 256 << 20
	unsentShare = 32 << 20
	leastShare  = 2 << 20
	// overdueAfter is how long a client may take nothing of a write while its user is over the share.
	overdueAfter = 250 * time.Millisecond
)

var heldUnsent = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "watershed_gateway_watch_inflight_bytes",
	Help: "Bytes of events that watches hold because their clients have not taken them yet.",
})

// Unsent counts the bytes that watches hold while they write them to their clients, by user. A watch whose user is over
// the share ends if its client takes nothing for overdueAfter. The zero value is ready to use.
type Unsent struct {
	mu sync.Mutex
	// total counts at most unsentShare of each user: what one holds beyond it does not take from the others' shares.
	total int64
	of    map[string]*unsent
}

// unsent is one user's part. Its methods work on nil, which has no bound.
type unsent struct {
	all     *Unsent
	owner   string
	watches int
	bytes   int64
}

// join returns the part of a user, until leave. It is nil for the empty owner: the system's own services and
// administrators have no bound.
func (u *Unsent) join(owner string) *unsent {
	if u == nil || owner == "" {
		return nil
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	o := u.of[owner]
	if o == nil {
		o = &unsent{all: u, owner: owner}
		if u.of == nil {
			u.of = map[string]*unsent{}
		}
		u.of[owner] = o
	}
	o.watches++
	return o
}

func (o *unsent) leave() {
	if o == nil {
		return
	}
	o.all.mu.Lock()
	defer o.all.mu.Unlock()
	if o.watches--; o.watches == 0 {
		delete(o.all.of, o.owner)
	}
}

// share returns how many bytes a user may hold now. The lock is held.
func (u *Unsent) share() int64 {
	if u.total > unsentBytes {
		return leastShare
	}
	return unsentShare
}

// hold counts n bytes for as long as a watch writes them, and fewer with a negative n. It reports whether the user is
// over its share.
func (o *unsent) hold(n int) (over bool) {
	if o == nil {
		return false
	}
	u := o.all
	u.mu.Lock()
	defer u.mu.Unlock()
	u.total -= min(o.bytes, unsentShare)
	o.bytes += int64(n)
	u.total += min(o.bytes, unsentShare)
	heldUnsent.Add(float64(n))
	return o.bytes > u.share()
}
