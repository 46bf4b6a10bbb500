package watch

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	// maxInflightBytes bounds what all watches together hold for clients that have not taken it yet; maxOwnerBytes is one
	// user's share of it. Beyond the bound each user's share is minOwnerBytes.
	maxInflightBytes = 256 << 20
	maxOwnerBytes    = 32 << 20
	minOwnerBytes    = 2 << 20
	// overQuotaTimeout is how long a client may take nothing of a write while its user is over the share.
	overQuotaTimeout = 250 * time.Millisecond
)

var inflightBytes = prometheus.NewGauge(prometheus.GaugeOpts{
	Name: "watershed_gateway_watch_inflight_bytes",
	Help: "Bytes of events that watches hold because their clients have not taken them yet.",
})

// InflightQuota counts the bytes that watches hold while they write them to their clients, by user. A watch whose user is over
// the share ends if its client takes nothing for overQuotaTimeout. The zero value is ready to use.
type InflightQuota struct {
	mu sync.Mutex
	// total counts at most maxOwnerBytes of each user: what one holds beyond it does not take from the others' shares.
	total  int64
	owners map[string]*ownerQuota
}

// ownerQuota is one user's part. Its methods work on nil, which has no bound.
type ownerQuota struct {
	quota   *InflightQuota
	owner   string
	watches int
	bytes   int64
}

// join returns the part of a user, until leave. It is nil for the empty owner: the system's own services and
// administrators have no bound.
func (q *InflightQuota) join(owner string) *ownerQuota {
	if q == nil || owner == "" {
		return nil
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	o := q.owners[owner]
	if o == nil {
		o = &ownerQuota{quota: q, owner: owner}
		if q.owners == nil {
			q.owners = map[string]*ownerQuota{}
		}
		q.owners[owner] = o
	}
	o.watches++
	return o
}

func (o *ownerQuota) leave() {
	if o == nil {
		return
	}
	o.quota.mu.Lock()
	defer o.quota.mu.Unlock()
	if o.watches--; o.watches == 0 {
		delete(o.quota.owners, o.owner)
	}
}

// ownerLimit returns how many bytes a user may hold now. The lock is held.
func (q *InflightQuota) ownerLimit() int64 {
	if q.total > maxInflightBytes {
		return minOwnerBytes
	}
	return maxOwnerBytes
}

// account counts n bytes for as long as a watch writes them, and fewer with a negative n. It reports whether the user is
// over its share.
func (o *ownerQuota) account(n int) (over bool) {
	if o == nil {
		return false
	}
	q := o.quota
	q.mu.Lock()
	defer q.mu.Unlock()
	q.total -= min(o.bytes, maxOwnerBytes)
	o.bytes += int64(n)
	q.total += min(o.bytes, maxOwnerBytes)
	inflightBytes.Add(float64(n))
	return o.bytes > q.ownerLimit()
}
