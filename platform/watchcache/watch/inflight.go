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

// maxInflightBytes bounds the bytes of large messages that gRPC has accepted and not written yet, for all owners
// together. Each owner's first message may exceed it.
const maxInflightBytes = 32 << 20

// inflightQuota bounds the bytes that a replica's streams have in flight. An owner may have as many bytes in flight as
// are free, so a single owner gets half of the limit. Each owner may always have one message in flight, so many owners
// may exceed the limit by one message each. The streams of one owner therefore receive a large event one after the
// other. A waiting stream holds its cursor and no bytes.
type inflightQuota struct {
	limit int64

	mu     sync.Mutex
	used   int64
	owners map[string]*ownerQuota
}

// ownerQuota is one owner's share. It exists while the owner has bytes in flight or waiting messages.
type ownerQuota struct {
	used    int64
	waiting []*waiter // in order of arrival
}

// waiter is a waiting message. grant closes its channel when the message may be sent.
type waiter struct {
	bytes   int64
	granted chan struct{}
}

func newInflightQuota(limit int64) *inflightQuota {
	return &inflightQuota{limit: limit, owners: map[string]*ownerQuota{}}
}

// acquire waits until the owner may have n more bytes in flight. The caller calls release when the bytes are written;
// further calls have no effect. An empty owner never waits, because the system's own services have no quota. acquire
// returns nil if stop or ctx ends first.
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
		f.grant(o) // a smaller message may have waited behind it
		f.forget(owner, o)
	} else { // it was granted meanwhile
		f.free(owner, o, n)
	}
	return nil
}

// tryAcquire is acquire without waiting. It returns nil if the owner would have to wait.
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

// fits reports whether an owner may have n more bytes in flight: as many as are free, and one message in any case. The
// caller holds mu.
func (f *inflightQuota) fits(o *ownerQuota, n int64) bool {
	return o.used == 0 || o.used+n <= f.limit-f.used
}

// releaseOf returns the function that releases n bytes of an owner, once.
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

// free releases bytes and grants waiting messages. The caller holds mu.
func (f *inflightQuota) free(owner string, o *ownerQuota, n int64) {
	f.used -= n
	o.used -= n
	f.grant(o) // its own messages first, because the other owners have had their part of the free bytes
	for _, other := range f.owners {
		f.grant(other)
	}
	f.forget(owner, o)
}

// grant grants the owner's messages that fit, in order of arrival. The caller holds mu.
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

// forget removes an owner without bytes in flight and without waiting messages. The caller holds mu.
func (f *inflightQuota) forget(owner string, o *ownerQuota) {
	if o.used == 0 && len(o.waiting) == 0 && f.owners[owner] == o {
		delete(f.owners, owner)
	}
}

// errQuotaExceeded means that the watch's owner has too many bytes in flight to send the next event.
var errQuotaExceeded = errors.New("the owner has too many bytes in flight")

// tryReserve reserves n bytes for the watch's owner. It returns nil if the owner must wait.
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

// waitForQuota waits until the event for which deliver returned errQuotaExceeded may be in flight.
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

// reserve waits until the watch's owner may have n more bytes in flight, and returns the function that releases them.
func (w *watcher) reserve(n int) (release func(), err error) {
	ctx := w.stream.Context()
	release = w.server.inflight.acquire(ctx, w.server.draining, w.request.Owner, int64(n))
	switch {
	case release != nil:
		return release, nil
	case ctx.Err() != nil:
		return nil, status.FromContextError(ctx.Err()).Err()
	}
	return nil, rpc.ErrDraining
}
