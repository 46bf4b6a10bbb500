package watch

import (
	"sync"
	"time"
)

const (
	// maxInflightBytes limits the bytes that all watches hold until their clients have accepted them. maxOwnerBytes is
	// the limit of a user. While the total exceeds maxInflightBytes, a user's limit is minOwnerBytes.
	maxInflightBytes = 256 << 20
	maxOwnerBytes    = 32 << 20
	minOwnerBytes    = 2 << 20
	// overQuotaTimeout is how long a client may accept no data of a write while its user is over the limit.
	overQuotaTimeout = 250 * time.Millisecond
)

// InflightQuota accounts for the bytes that watches hold while they write them to clients, by user. If a user is over
// the limit, its watches end when the client accepts no data for overQuotaTimeout. The zero value is ready to use.
type InflightQuota struct {
	mu sync.Mutex
	// total counts at most maxOwnerBytes of each user, so a user over the limit does not reduce the limits of others.
	total  int64
	owners map[string]*ownerQuota
}

// ownerQuota is a user's account. Nil has no limit.
type ownerQuota struct {
	quota   *InflightQuota
	owner   string
	watches int
	bytes   int64
}

// join returns the account of a user, until leave. It is nil for the empty owner: the system's own services and
// administrators have no limit.
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

// account adds n bytes while a watch writes them, and removes them with a negative n. It reports whether the user is
// over its limit.
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
