package watch

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/status"

	"watershed.dev/platform/rpc"
)

// maxInflightBytes bounds the bytes of large messages that gRPC has accepted and not written yet, for all owners together.
// One message of each owner may exceed it.
const maxInflightBytes = 32 << 20

// inflightQuota bounds the bytes that a replica's streams have in flight. An owner has at most as many bytes as are free: an
// owner alone has half of the bound. Each owner may always have one message in flight, so many owners may exceed the
// bound by one message each. An owner's thousands of streams so receive a large event one after the other. A stream
// that waits holds its cursor and no bytes.
type inflightQuota struct {
	limit int64

	mu     sync.Mutex
	used   int64
	owners map[string]*ownerQuota
}

// ownerQuota is one owner's part. It exists while the owner has bytes in flight or waiting.
type ownerQuota struct {
	used    int64
	waiting []*waiter // in the order in which they came
}

// waiter is a message that waits. Its channel is closed when it may be sent.
type waiter struct {
	bytes   int64
	granted chan struct{}
}

func newInflightQuota(limit int64) *inflightQuota {
	return &inflightQuota{limit: limit, owners: map[string]*ownerQuota{}}
}

// acquire waits until the owner may have n bytes more in flight. The caller calls release, any number of times, when they
// are no longer. An empty owner never waits: the system's own services have no share. stop ends the waiting with a nil
// release, as ctx does.
func (f *inflightQuota) acquire(ctx context.Context, stop <-chan struct{}, owner string, n int64) (release func()) {
	if owner == "" {
		return func() {}
	}
	f.mu.Lock()
	o := f.owners[owner]
	if o == nil {
		o = &ownerQuota{}
		f.owners[owner] = o
	}
	w := &waiter{n, make(chan struct{})}
	o.waiting = append(o.waiting, w)
	f.grant(o)
	f.mu.Unlock()
	select {
	case <-w.granted:
		return f.releaseOf(owner, o, n)
	default:
	}
	select {
	case <-w.granted:
		return f.releaseOf(owner, o, n)
	case <-stop:
	case <-ctx.Done():
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := slices.Index(o.waiting, w); i >= 0 {
		o.waiting = slices.Delete(o.waiting, i, i+1)
		f.forget(owner, o)
	} else { // it was granted meanwhile
		f.free(owner, o, n)
	}
	return nil
}

// tryAcquire is take for an owner that need not wait. It returns nil if it must.
func (f *inflightQuota) tryAcquire(owner string, n int64) (release func()) {
	if owner == "" {
		return func() {}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	o := f.owners[owner]
	switch {
	case o == nil:
		o = &ownerQuota{}
		f.owners[owner] = o
	case len(o.waiting) > 0 || !f.fits(o, n):
		return nil
	}
	o.used += n
	f.used += n
	return f.releaseOf(owner, o, n)
}

// fits reports whether an owner may have n bytes more in flight: as many as others have not, and one message in any
// case. The lock is held.
func (f *inflightQuota) fits(o *ownerQuota, n int64) bool {
	return o.used == 0 || o.used+n <= f.limit-f.used
}

// releaseOf returns the function that gives n bytes of an owner back, once.
func (f *inflightQuota) releaseOf(owner string, o *ownerQuota, n int64) func() {
	var done atomic.Bool
	return func() {
		if done.CompareAndSwap(false, true) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.free(owner, o, n)
		}
	}
}

// free gives bytes back and lets those go on that wait. The lock is held.
func (f *inflightQuota) free(owner string, o *ownerQuota, n int64) {
	f.used -= n
	o.used -= n
	f.grant(o) // its own first: the others have had what it leaves
	for _, other := range f.owners {
		f.grant(other)
	}
	f.forget(owner, o)
}

// grant grants the owner's messages that fit, in the order in which they came. The lock is held.
func (f *inflightQuota) grant(o *ownerQuota) {
	for len(o.waiting) > 0 {
		w := o.waiting[0]
		if !f.fits(o, w.bytes) {
			return
		}
		o.waiting[0] = nil
		o.waiting = o.waiting[1:]
		o.used += w.bytes
		f.used += w.bytes
		close(w.granted)
	}
}

// forget drops an owner that has nothing left. The lock is held.
func (f *inflightQuota) forget(owner string, o *ownerQuota) {
	if o.used == 0 && len(o.waiting) == 0 && f.owners[owner] == o {
		delete(f.owners, owner)
	}
}

// errQuotaExceeded means that the watch's owner has too many bytes in flight for the next event.
var errQuotaExceeded = errors.New("the owner has too many bytes in flight")

// tryReserve reserves n bytes for the watch's owner, and returns nil if they must be waited for.
func (w *watcher) tryReserve(n int) (release func()) {
	if w.granted != nil && w.wanted >= n {
		release, w.granted = w.granted, nil
		return release
	}
	w.releaseGranted()
	if release = w.server.inflight.tryAcquire(w.request.Owner, int64(n)); release == nil {
		w.wanted = n
	}
	return release
}

// waitForQuota waits until the event may be in flight for which deliver failed with errQuotaExceeded.
func (w *watcher) waitForQuota() (err error) {
	w.granted, err = w.reserve(w.wanted)
	return err
}

// releaseGranted releases bytes that were granted for an event that the watch has not sent.
func (w *watcher) releaseGranted() {
	if w.granted != nil {
		w.granted()
		w.granted = nil
	}
}

// reserve waits until the watch's owner may have n bytes more in flight, and returns what gives them back.
func (w *watcher) reserve(n int) (release func(), err error) {
	ctx := w.stream.Context()
	release = w.server.inflight.acquire(ctx, w.logReader.Draining(), w.request.Owner, int64(n))
	switch {
	case release != nil:
		return release, nil
	case ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return nil, rpc.ErrDraining
}
