package cache

import (
	"context"
	"slices"
	"sync"

	"watershed.dev/platform/events"
	"watershed.dev/platform/recovery"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Event is one change. Item is the object after it. For a deletion, Item is the last state, at the deletion's revision.
// Previous is the object before the change, at this revision. It is set only if a selector could distinguish the two.
type Event struct {
	Type           logv1.Type
	Revision       int64
	Index          int32
	Item, Previous *Item
	// Traceparent is the event's trace context; empty if it is not traced.
	Traceparent string

	// resource is the resource whose ring has the event. It is nil in a backfill and in a cache of events only.
	resource *Resource
	frames   frameCache
}

// EventOf returns the log's event as the cache holds it.
func EventOf(p *logv1.Event) *Event {
	e := &Event{
		Type:        p.Type,
		Revision:    p.Revision,
		Index:       p.Index,
		Traceparent: p.Traceparent,
	}
	e.Item = itemOf(p.Namespace, p.Name, p.Revision, p.Object)
	if p.Previous != nil {
		e.Previous = itemOf(p.Namespace, p.Name, p.Revision, p.Previous)
	}
	return e
}

// At returns the event's position.
func (e *Event) At() events.Position { return events.Position{Revision: e.Revision, Index: e.Index} }

// Size returns the event's memory in bytes without its frames.
func (e *Event) Size() int {
	n := e.Item.Size() + eventBytes
	if e.Previous != nil {
		n += e.Previous.Size()
	}
	return n
}

// eventBytes is the memory of an event beside its objects.
const eventBytes = 200

// release removes the event from its ring's account, and returns the bytes that it counted. Frames built later are not
// counted.
func (e *Event) release() int {
	e.frames.mu.Lock()
	defer e.frames.mu.Unlock()
	n := e.Size() + e.frames.bytes
	e.frames.released = true
	return n
}

// dropFrames drops the event's frames.
func (e *Event) dropFrames() {
	f := &e.frames
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.released || f.bytes == 0 {
		return
	}
	f.entries = slices.DeleteFunc(f.entries, (*cachedFrame).isDone)
	e.resource.addBytes(-int64(f.bytes)) // under the lock, so that a reset counts the frames either here or there
	f.bytes = 0
}

// Frame returns a frame of the event. It is built at most once for each key while a ring holds the event with its
// frames, and counts to the ring's bytes. Frame returns early if ctx ends.
func (e *Event) Frame(ctx context.Context, key any, build func(context.Context) ([]byte, error)) ([]byte, error) {
	// No ring accounts for the event's frames, so only concurrent callers share them.
	if e.resource == nil {
		return e.frames.get(ctx, key, build, nil)
	}
	return e.frames.get(ctx, key, build, func(n int) { e.resource.addBytes(int64(n)) })
}

// frameCache caches the frames built from an event, so that each is built once for all watches.
type frameCache struct {
	mu      sync.Mutex
	entries []*cachedFrame
	// bytes counts the frames built before the event was released.
	bytes    int
	released bool
}

type cachedFrame struct {
	key   any
	done  chan struct{}
	bytes []byte
	err   error
	// waiters counts the callers that wait for the frame. cancel ends the build when there are none.
	waiters int
	cancel  context.CancelFunc
}

func (m *cachedFrame) isDone() bool {
	select {
	case <-m.done:
		return true
	default:
		return false
	}
}

// get returns the frame for key, and builds it if it is missing. Callers with the same key share one build; callers
// with other keys do not wait. build's context ends when the contexts of all waiting callers have ended. get calls
// addBytes with the size of a cached frame; if addBytes is nil, the frame is not cached.
func (d *frameCache) get(ctx context.Context, key any, build func(context.Context) ([]byte, error),
	addBytes func(int)) ([]byte, error) {
	d.mu.Lock()
	for _, m := range d.entries {
		if m.key != key || m.waiters == 0 {
			continue
		}
		if m.isDone() {
			d.mu.Unlock()
			return m.bytes, m.err
		}
		m.waiters++
		d.mu.Unlock()
		select {
		case <-m.done:
			return m.bytes, m.err
		case <-ctx.Done():
			d.leave(m)
			return nil, ctx.Err()
		}
	}
	buildCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	m := &cachedFrame{
		key:     key,
		done:    make(chan struct{}),
		waiters: 1,
		cancel:  cancel,
	}
	d.entries = append(d.entries, m)
	d.mu.Unlock()
	defer context.AfterFunc(ctx, func() { d.leave(m) })()
	m.bytes, m.err = withRecovery(func() ([]byte, error) { return build(buildCtx) })
	d.mu.Lock()
	defer d.mu.Unlock()
	close(m.done) // under the lock, because leave ignores the callers of a finished frame
	m.waiters = max(m.waiters, 1)
	if m.err != nil || addBytes == nil { // the next caller builds it again
		d.entries = slices.DeleteFunc(d.entries, func(o *cachedFrame) bool { return o == m })
	} else if !d.released {
		d.bytes += len(m.bytes)
		addBytes(len(m.bytes))
	}
	return m.bytes, m.err
}

// leave removes a waiting caller whose context has ended.
func (d *frameCache) leave(m *cachedFrame) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if m.isDone() {
		return
	}
	if m.waiters--; m.waiters == 0 {
		m.cancel()
	}
}

// withRecovery returns a panic as an error, because other callers wait for the frame.
func withRecovery(build func() ([]byte, error)) (data []byte, err error) {
	defer recovery.ToError("making a frame", &err)
	return build()
}
