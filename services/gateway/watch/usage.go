package watch

import (
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/peer"
)

// Usages counts the open watches and their bytes by user and resource. It has an entry for each user and resource with
// an open watch, and for two samples after the last watch has left. The delivery of events does not use it: Snapshot
// computes the bytes from the positions of receivers.
type Usages struct {
	// Hubs are the hubs with these watches. Set it before the first watch.
	Hubs []*Hub

	mu      sync.Mutex
	entries map[usageKey]*usage
	// closed is the number of entries without an open watch, at most maxClosed.
	closed int

	// snapshot guards the fields below, and scan and samples of the entries. It is locked before every other lock.
	snapshot sync.Mutex
	// samples are the times of the last two samples.
	samples [2]time.Time
}

type usageKey struct{ user, group, resource string }

// usage is the open watches of a user for a resource. Its methods accept nil.
type usage struct {
	parent *Usages
	key    usageKey
	// open is the number of open watches, and samplesSinceEnd the number of samples since the last watch has ended.
	// parent.mu guards both.
	open, samplesSinceEnd int
	// bytes never decreases. The bytes of a receiver since receiver.start are not in it.
	bytes atomic.Int64

	// samples has the bytes at parent.samples.
	samples [2]int64
	scan    scan
}

// scan is the state of the receivers of a usage in a snapshot.
type scan struct {
	synced   int
	behind   int64
	replicas []string
}

// join adds a watch, until leave.
func (u *Usages) join(r *Request) *usage {
	if u == nil {
		return nil
	}
	key := usageKey{ShortName(r.User), r.Query.GetResource().GetGroup(), r.Query.GetResource().GetResource()}
	u.mu.Lock()
	defer u.mu.Unlock()
	e := u.entries[key]
	if e == nil {
		e = &usage{parent: u, key: key}
		if u.entries == nil {
			u.entries = map[usageKey]*usage{}
		}
		u.entries[key] = e
	} else if e.open == 0 {
		u.closed--
	}
	e.open++
	e.samplesSinceEnd = 0
	return e
}

func (e *usage) leave() {
	if e == nil {
		return
	}
	u := e.parent
	u.mu.Lock()
	defer u.mu.Unlock()
	switch e.open--; {
	case e.open > 0:
	case u.closed < maxClosed:
		u.closed++
	default:
		delete(u.entries, e.key)
	}
}

func (e *usage) add(bytes int64) {
	if e != nil {
		e.bytes.Add(bytes)
	}
}

const (
	// maxName bounds a name in bytes. nameHead is longer than the namespace in the name of a service account. The
	// other bytes are the tail.
	maxName  = 128
	nameHead = 90
)

// ShortName returns a text that a client chose, such as a user's name. If it has more than 128 bytes, it has only its
// head and its tail, because a tenant chooses the end of the name of a service account.
func ShortName(text string) string {
	if len(text) > maxName {
		text = text[:nameHead] + "…" + text[len(text)-(maxName-nameHead):]
	}
	return strings.ToValidUTF8(text, "\uFFFD")
}

// Usage is the open watches of a user for a resource, and the bytes of recent watches.
type Usage struct {
	User string `json:"user"`
	// Resource is the resource and its group, such as "deployments.apps".
	Resource string `json:"resource"`
	Watches  int    `json:"watches"`
	// Unsynced is the number of watches with a stream of their own: for initial or older events, or before the first
	// row of a Table.
	Unsynced int `json:"unsynced,omitempty"`
	// Behind is the number of events that wait for the slowest watch.
	Behind int64 `json:"behind,omitempty"`
	// BytesPerSecond is the rate of the last 8 to 20 s, or 0 before the second snapshot.
	BytesPerSecond float64 `json:"bytesPerSecond,omitempty"`
	// Replicas are addresses of replicas that send the events, at most maxReplicas. A socket has no directory.
	Replicas []string `json:"replicas,omitempty"`
}

const (
	// maxReplicas bounds Usage.Replicas.
	maxReplicas = 4
	// maxClosed bounds Usages.closed.
	maxClosed = 1 << 10
	// samplePeriod is the least time between two samples.
	samplePeriod = 8 * time.Second
	// scanReceivers is the number of receivers that a snapshot reads while it holds a broadcast's lock.
	scanReceivers = 1 << 10
)

// Snapshot returns the usages with open or recent watches, in no order. Its time grows with the number of watches.
func (u *Usages) Snapshot(now time.Time) []Usage {
	u.snapshot.Lock()
	defer u.snapshot.Unlock()
	due := now.Sub(u.samples[1]) >= samplePeriod
	u.mu.Lock()
	entries, open := make([]*usage, 0, len(u.entries)), make([]int, 0, len(u.entries))
	for _, e := range u.entries {
		if due && e.open == 0 {
			if e.samplesSinceEnd++; e.samplesSinceEnd == len(u.samples) { // this snapshot is the last with the entry
				delete(u.entries, e.key)
				u.closed--
			}
		}
		e.scan = scan{}
		entries, open = append(entries, e), append(open, e.open)
	}
	u.mu.Unlock()
	for _, h := range u.Hubs {
		h.mu.Lock()
		all := make([]*watchBroadcast, 0, len(h.broadcasts))
		for _, b := range h.broadcasts {
			all = append(all, b)
		}
		h.mu.Unlock()
		for _, b := range all {
			b.scan()
		}
	}
	oldest := 0
	if u.samples[0].IsZero() {
		oldest = 1
	}
	since := u.samples[oldest]
	if due {
		u.samples[0], u.samples[1] = u.samples[1], now
	}
	out := make([]Usage, 0, len(entries))
	for i, e := range entries {
		total := e.bytes.Load()
		row := Usage{
			User:     e.key.user,
			Resource: strings.TrimSuffix(e.key.resource+"."+e.key.group, "."),
			Watches:  open[i],
			Unsynced: max(0, open[i]-e.scan.synced),
			Behind:   e.scan.behind,
			Replicas: e.scan.replicas,
		}
		if elapsed := now.Sub(since); !since.IsZero() && elapsed > 0 {
			row.BytesPerSecond = float64(total-e.samples[oldest]) / elapsed.Seconds()
		}
		if due {
			e.samples[0], e.samples[1] = e.samples[1], total
		}
		out = append(out, row)
	}
	return out
}

// scan adds the receivers of a broadcast to their usages.
func (b *watchBroadcast) scan() {
	for from := 0; ; from += scanReceivers {
		b.mu.Lock()
		some := b.receivers[min(from, len(b.receivers)):min(from+scanReceivers, len(b.receivers))]
		for _, r := range some {
			e := r.watch.usage
			if e == nil {
				continue
			}
			behind, _ := b.Backlog(&r.Receiver)
			e.scan.synced++
			e.scan.behind = max(e.scan.behind, behind)
			b.count(r)
			if s := &e.scan; b.replica != "" && len(s.replicas) < maxReplicas && !slices.Contains(s.replicas, b.replica) {
				s.replicas = append(s.replicas, b.replica)
			}
		}
		last := len(some) < scanReceivers
		b.mu.Unlock()
		if last {
			return
		}
	}
}

// count adds the receiver's bytes since receiver.start to its usage. sentTo is an estimate while events wait, so it may
// decrease. The lock is held.
func (b *watchBroadcast) count(r *receiver) {
	if sent := b.sentTo(r); sent > r.start {
		r.watch.usage.add(sent - r.start)
		r.start = sent
	}
}

// sentTo returns the size of the broadcast's events that a receiver has received, including the events before it
// joined. The lock is held.
func (b *watchBroadcast) sentTo(r *receiver) int64 {
	_, pending := b.Backlog(&r.Receiver)
	return b.added - pending
}

// sentBy records the replica that sends a stream, after its first frame.
func (b *watchBroadcast) sentBy(s *replicaStream) {
	if b.hub.Usages == nil || b.replicaStream == s {
		return
	}
	replica := ""
	if p, ok := peer.FromContext(s.Context()); ok && p.Addr != nil {
		if replica = p.Addr.String(); p.Addr.Network() == "unix" {
			replica = "unix:" + filepath.Base(replica)
		}
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.replica, b.replicaStream = replica, s
}
