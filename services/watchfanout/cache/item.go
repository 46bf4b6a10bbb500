package cache

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/recovery"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Item is one object. It does not change.
type Item struct {
	// Key is "namespace/name", or "name" for a cluster's own objects: etcd's order.
	Key             string
	Namespace, Name string
	Revision        int64
	Labels, Fields  map[string]string
	// JSON has no apiVersion and kind; Protobuf has no envelope.
	JSON, Protobuf []byte
	// Version is the one that JSON is in, of a custom resource's object: each is as it is stored.
	Version string

	// Serial tells the item from every other that the process has made.
	Serial uint64

	// selectorBytes is the memory that Labels and Fields take.
	selectorBytes int
	// metadataEnd is where in JSON that ends, once it was asked for.
	metadataEnd atomic.Int32
}

// ThroughMetadata is frame.ThroughMetadata of JSON; where that ends is looked for once.
func (i *Item) ThroughMetadata() ([]byte, error) {
	if end := i.metadataEnd.Load(); end > 0 {
		return i.JSON[:end], nil
	}
	through, err := frame.ThroughMetadata(i.JSON)
	if err != nil {
		return nil, err
	}
	i.metadataEnd.Store(int32(len(through)))
	return through, nil
}

// lastSerial is the last item's.
var lastSerial atomic.Uint64

// Size is the memory that the item takes.
func (i *Item) Size() int { return len(i.JSON) + len(i.Protobuf) + len(i.Key) + 200 + i.selectorBytes }

// pairBytes is about what an entry of a map takes beside its strings' bytes.
const pairBytes = 50

func sizeOf(pairs map[string]string) (n int) {
	for k, v := range pairs {
		n += len(k) + len(v) + pairBytes
	}
	return n
}

// Event is one change. Item is the object after it (for a deletion the last state, at the deletion's revision);
// Previous is the object before it at this revision, where a selector could tell the two apart.
type Event struct {
	Type           logv1.Type
	Revision       int64
	Index          int32
	Item, Previous *Item
	// Traceparent is the event's span; empty where it is not traced.
	Traceparent string

	resource *Resource // whose ring it is in
	frames   frameCache
}

// Size is the memory that the event takes before anything is made of it.
func (e *Event) Size() int {
	n := e.Item.Size() + eventBytes
	if e.Previous != nil {
		n += e.Previous.Size()
	}
	return n
}

// eventBytes is what an event takes beside its objects.
const eventBytes = 200

// release takes the event out of its ring's account, and answers what it stood there for. Frames made later are their
// maker's.
func (e *Event) release() int {
	e.frames.mu.Lock()
	defer e.frames.mu.Unlock()
	n := e.Size() + e.frames.bytes
	e.frames.released = true
	return n
}

// frameCache keeps what was made of an event, so that it is made once for all who want it.
type frameCache struct {
	mu      sync.Mutex
	entries []*cachedFrame
	// bytes is what was made, until the event is released.
	bytes    int
	released bool
}

type cachedFrame struct {
	key   any
	done  chan struct{}
	bytes []byte
	err   error
	// waiters are the callers that wait for it, and cancel ends its making once there are none.
	waiters int
	cancel  context.CancelFunc
}

// get makes what is not there. Who wants the same waits for it; who wants something else does not. The context of build
// ends when the context of every caller that waits has ended. grown accounts for what is kept; where it is nil nothing
// is.
func (d *frameCache) get(ctx context.Context, key any, build func(context.Context) ([]byte, error),
	addBytes func(int)) ([]byte, error) {
	d.mu.Lock()
	for _, m := range d.entries {
		if m.key != key || m.waiters == 0 {
			continue
		}
		select {
		case <-m.done:
			d.mu.Unlock()
			return m.bytes, m.err
		default:
		}
		m.waiters++
		d.mu.Unlock()
		defer context.AfterFunc(ctx, func() { d.leave(m) })()
		select {
		case <-m.done:
			return m.bytes, m.err
		case <-ctx.Done():
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
	close(m.done) // under the lock: leave does not count the callers of a frame that is made
	m.waiters = max(m.waiters, 1)
	if m.err != nil || addBytes == nil { // the next one makes it again
		d.entries = slices.DeleteFunc(d.entries, func(o *cachedFrame) bool { return o == m })
	} else if !d.released {
		d.bytes += len(m.bytes)
		addBytes(len(m.bytes))
	}
	return m.bytes, m.err
}

// leave takes a caller's interest away whose context has ended.
func (d *frameCache) leave(m *cachedFrame) {
	d.mu.Lock()
	defer d.mu.Unlock()
	select {
	case <-m.done:
		return
	default:
	}
	if m.waiters--; m.waiters == 0 {
		m.cancel()
	}
}

// withRecovery makes a panic an error: others wait for the frame.
func withRecovery(build func() ([]byte, error)) (data []byte, err error) {
	defer recovery.ToError("making a frame", &err)
	return build()
}

// Frame is a frame of the event, made at most once for each key for as long as a ring holds the event. It counts among
// what that holds. It ends early when ctx does.
func (e *Event) Frame(ctx context.Context, key any, build func(context.Context) ([]byte, error)) ([]byte, error) {
	// a backfill's: no ring accounts for its frames, so none is kept beyond those who wait for it now
	if e.resource == nil {
		return e.frames.get(ctx, key, build, nil)
	}
	return e.frames.get(ctx, key, build, func(n int) { e.resource.ringBytes.Add(int64(n)) })
}

// EventOf is the log's event as the cache has it.
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

func itemOf(namespace, name string, revision int64, o *logv1.Object) *Item {
	return &Item{
		Key:           Key(namespace, name),
		Namespace:     namespace,
		Name:          name,
		Revision:      revision,
		Labels:        o.Labels,
		Fields:        o.Fields,
		JSON:          o.Json,
		Protobuf:      o.Protobuf,
		Version:       o.Version,
		Serial:        lastSerial.Add(1),
		selectorBytes: sizeOf(o.Labels) + sizeOf(o.Fields),
	}
}

// Key is an object's place in the order of etcd's keys.
func Key(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

func itemOfRow(row *registryv1.Row) *Item {
	return &Item{
		Key:           Key(row.Namespace, row.Name),
		Namespace:     row.Namespace,
		Name:          row.Name,
		Revision:      row.Revision,
		Labels:        row.Labels,
		Fields:        row.Fields,
		JSON:          row.Json,
		Protobuf:      row.Protobuf,
		Version:       row.Version,
		Serial:        lastSerial.Add(1),
		selectorBytes: sizeOf(row.Labels) + sizeOf(row.Fields),
	}
}
