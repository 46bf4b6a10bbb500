package cache

import (
	"context"
	"hash/fnv"
	"slices"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/fields"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/recovery"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Item is one object. It does not change, except that its encodings may be packed.
type Item struct {
	// Key is "namespace/name", or "name" for cluster-scoped objects: the order of etcd's keys.
	Key             string
	Namespace, Name string
	Revision        int64
	Labels          map[string]string
	// fields are the selectable fields; nil if metadata.name and metadata.namespace are all, as for most kinds.
	fields map[string]string
	// Version is the API version of the JSON. Only custom resources have it, because etcd holds each of their objects
	// in the version that it was written in.
	Version string

	// Serial identifies the item among all items of the process.
	Serial uint64

	json, protobuf atomic.Pointer[encoding]
	// selectorBytes is the memory of Labels and fields.
	selectorBytes int32
	// metadataEnd is the offset in the JSON at which the metadata ends; 0 until MetadataEnd computes it.
	metadataEnd atomic.Int32
	// uidHash is the hash of metadata.uid; 0 until UIDHash computes it.
	uidHash atomic.Uint64
}

// Selectable fields of every kind.
const (
	nameField      = "metadata.name"
	namespaceField = "metadata.namespace"
)

// Field returns a selectable field; empty if the object lacks it.
func (i *Item) Field(name string) string {
	switch name {
	case nameField:
		return i.Name
	case namespaceField:
		return i.Namespace
	}
	return i.fields[name]
}

// Fields returns the selectable fields.
func (i *Item) Fields() fields.Fields { return (*selectable)(i) }

// selectable implements fields.Fields.
type selectable Item

func (s *selectable) Get(name string) string { return (*Item)(s).Field(name) }

func (s *selectable) Has(name string) bool {
	_, has := s.fields[name]
	return has || name == nameField || name == namespaceField && s.Namespace != ""
}

// JSON returns the object as JSON without apiVersion and kind.
func (i *Item) JSON() []byte { return i.json.Load().bytes() }

// Protobuf returns the object's protobuf without an envelope; empty for a custom resource.
func (i *Item) Protobuf() []byte { return i.protobuf.Load().bytes() }

// JSONSize returns the size of JSON in bytes.
func (i *Item) JSONSize() int { return i.json.Load().len() }

// ProtobufSize returns the size of Protobuf in bytes.
func (i *Item) ProtobufSize() int { return i.protobuf.Load().len() }

// UIDHash returns ShardHash of metadata.uid. It computes the hash only once.
func (i *Item) UIDHash() uint64 {
	hash := i.uidHash.Load()
	if hash == 0 {
		hash = ShardHash(frame.UID(i.JSON()))
		i.uidHash.Store(hash)
	}
	return hash
}

// ShardHash returns the hash by which a shard selector selects: FNV-1a with 64 bits (k8s.io/apimachinery/pkg/sharding).
func ShardHash(value string) uint64 {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(value))
	return hash.Sum64()
}

// MetadataEnd returns the offset in JSON at which the metadata ends. It finds the end only once.
func (i *Item) MetadataEnd() (int, error) {
	if end := i.metadataEnd.Load(); end > 0 {
		return int(end), nil
	}
	through, err := frame.ThroughMetadata(i.JSON())
	if err != nil {
		return 0, err
	}
	i.metadataEnd.Store(int32(len(through)))
	return len(through), nil
}

// ThroughMetadata returns frame.ThroughMetadata of JSON.
func (i *Item) ThroughMetadata() ([]byte, error) {
	end, err := i.MetadataEnd()
	if err != nil {
		return nil, err
	}
	return i.JSON()[:end], nil
}

// lastSerial is the serial of the newest item.
var lastSerial atomic.Uint64

// Size returns the item's memory in bytes, approximately, while its encodings are not packed.
func (i *Item) Size() int {
	return i.JSONSize() + i.ProtobufSize() + len(i.Key) + 200 + int(i.selectorBytes)
}

// mapBytes is about the memory of a map of up to eight pairs beside the bytes of their strings, and pairBytes that of
// each further pair.
const (
	mapBytes  = 336
	pairBytes = 37
)

func sizeOf(pairs map[string]string) (n int) {
	if len(pairs) > 0 {
		n = mapBytes + max(0, len(pairs)-8)*pairBytes
	}
	for k, v := range pairs {
		n += len(k) + len(v)
	}
	return n
}

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

// Frame returns a frame of the event. It is built at most once for each key while a ring holds the event with its
// frames, and counts to the ring's bytes. Frame returns early if ctx ends.
func (e *Event) Frame(ctx context.Context, key any, build func(context.Context) ([]byte, error)) ([]byte, error) {
	// No ring accounts for the event's frames, so only concurrent callers share them.
	if e.resource == nil {
		return e.frames.get(ctx, key, build, nil)
	}
	return e.frames.get(ctx, key, build, func(n int) { e.resource.addBytes(int64(n)) })
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

func itemOf(namespace, name string, revision int64, o *logv1.Object) *Item {
	i := newItem(namespace, name, revision, o.Labels, o.Fields)
	i.Version = o.Version
	i.setEncodings(o.Json, o.Protobuf)
	return i
}

// newItem returns an item without encodings. The item shares the maps with other caches of the process, so nothing may
// change them.
func newItem(namespace, name string, revision int64, labels, selectable map[string]string) *Item {
	if onlyNames(selectable) {
		selectable = nil
	}
	key := Key(namespace, name)
	return &Item{
		Key:           key,
		Namespace:     key[:len(namespace)], // shares the memory of key
		Name:          key[len(key)-len(name):],
		Revision:      revision,
		Labels:        labels,
		fields:        selectable,
		Serial:        lastSerial.Add(1),
		selectorBytes: int32(sizeOf(labels) + sizeOf(selectable)),
	}
}

// onlyNames reports whether the item itself has all selectable fields.
func onlyNames(selectable map[string]string) bool {
	for name := range selectable {
		if name != nameField && name != namespaceField {
			return false
		}
	}
	return true
}

func (i *Item) setEncodings(json, protobuf []byte) {
	i.json.Store(ownEncoding(json))
	if len(protobuf) > 0 {
		i.protobuf.Store(ownEncoding(protobuf))
	}
}

// Key returns an object's key, in the order of etcd's keys.
func Key(namespace, name string) string {
	if namespace == "" {
		return name
	}
	return namespace + "/" + name
}

// ItemOf returns an object as registry read it from etcd.
func ItemOf(row *registryv1.Row) *Item {
	i := newItem(row.Namespace, row.Name, row.Revision, row.Labels, row.Fields)
	i.Version = row.Version
	i.setEncodings(row.Json, row.Protobuf)
	return i
}
