// Package watch serves clients' watches. Watches with equal queries share a stream from their source: the watch tier
// or, for authn, authz and admission, registry. The package does not authorize requests and does not encode events.
//
// A watch starts unsynced, with its own stream, until it has received its initial events or a replay. When it has
// reached the position of the shared stream (a watchBroadcast), it joins it as a receiver. It becomes unsynced again if
// the broadcast no longer holds its next event. In both states its position is that of the last event sent. A lost
// replica, a lost broadcast and a slow client therefore have the same remedy: resume after that position.
//
// Goroutines: the request's goroutine runs Hub.Serve and is the only user of its Sink. A detached watch has a goroutine
// only while it has something to do (detached.go). A broadcast's goroutine receives frames and writes them to synced
// receivers. It runs only while there are frames. A shared call has a goroutine that receives, and another that sends
// while requests wait (multiplex.go). The goroutine of shared initial events reads ahead for their members. Limiters
// and connections call Unblock from timers or from their own goroutine. A timer of the hub wakes watches (wakeups).
//
// Review notes:
//
//   - No path may wait for a client while it holds watchBroadcast.mu: the broadcast's goroutine serves all receivers.
//   - Callbacks (Waiter.Unblock, MemoryQuota.trim) must run without the caller's lock. The receiver type documents the
//     lock order.
//   - A receiver must not drop or repeat an event. Every transition keeps cursor, position and skipUntil consistent.
//   - A goroutine per receiver was the obvious alternative. It costs a wakeup, a TLS record and a system call for every
//     event and watcher (see h2writer).
//   - A broadcast across owners was another. It fails because a replica delays large events by owner.
package watch

import (
	"context"
	"crypto/sha256"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/events"
	"watershed.dev/platform/watchcache/core"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/turns"
)

const (
	// resumeTimeout is how long an open watch waits for its source to return. After it the watch ends, and the client
	// retries.
	resumeTimeout = 30 * time.Second
	// idleTimeout is how long a broadcast outlives its last receiver. client-go watches again at once when its watch
	// times out.
	idleTimeout = 500 * time.Millisecond
	// lastBookmarkLead is how long before its deadline a watch gets its last bookmark, as in kube-apiserver
	// (k8s.io/apiserver/pkg/storage/cacher, cacheWatcher.nextBookmarkTime).
	lastBookmarkLead = 2 * time.Second
	// firstBookmarkDelay is how long after its start a watch's first bookmark is due. It comes after up to a
	// minute in kube-apiserver. Clients can resume from it.
	firstBookmarkDelay = time.Second
	// headersDelay is how long a response waits for its first frame before its headers are sent.
	headersDelay = 50 * time.Millisecond
	// revisionTimeout is how long a watch waits for etcd's current revision. After it the watch starts unsynced.
	revisionTimeout = time.Second
	// rejoinBackoff is how long a watch joins no broadcast after its last broadcast ended. The cause may end the next
	// broadcast too.
	rejoinBackoff = 10 * time.Second
	// minRetryDelay is the first delay before the next replica is tried. The delay grows to maxRetryDelay while no
	// replica responds.
	minRetryDelay = 20 * time.Millisecond
	maxRetryDelay = 500 * time.Millisecond
)

// retryDelay returns the delay before the next attempt: a quarter of the time since the first failure, within bounds.
func retryDelay(unavailableSince time.Time) time.Duration {
	return min(maxRetryDelay, max(minRetryDelay, time.Since(unavailableSince)/4))
}

// Watcher is the source of events: the watch tier or registry.
type Watcher interface {
	Watch(context.Context, *watchfanoutv1.WatchRequest,
		...grpc.CallOption) (grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error)
}

// Discovery has the resources that the gateway serves.
type Discovery interface {
	// Serves returns true if discovery has a resource. A watch of a deleted CRD ends, because no replica serves it.
	Serves(r *commonv1.Resource) bool
	// AwaitCRD waits until discovery has the CRD of a resource at an etcd revision or later, or lacks the resource, or
	// until ctx is done.
	AwaitCRD(ctx context.Context, r *commonv1.Resource, revision int64)
}

// Hub holds the open watches of a source. It is safe for concurrent use.
type Hub struct {
	Client    Watcher
	Config    *Config
	Discovery Discovery
	// MemoryQuota is the quota of the broadcasts of all hubs.
	MemoryQuota *MemoryQuota
	// RateLimiter holds the rate limiters of users for all hubs. Nil: no limit.
	RateLimiter *RateLimiter
	// InflightQuota accounts for bytes that watches of all hubs hold until clients have accepted them. Nil: no limit.
	InflightQuota *InflightQuota
	// Turns are the turns of long initial events, and of the source's long lists. Nil lets all work at once.
	Turns *turns.Turns
	// Usages counts the watches of all hubs by user and resource. Nil: no count.
	Usages *Usages
	// Revision returns the current revision of the etcd with an event log. If it is nil, a watch whose resourceVersion
	// the broadcast has not reached starts unsynced.
	Revision func(ctx context.Context, log string) (int64, error)

	revisions   coalesce.Group[int64]
	signals     signals
	wakeups     wakeups
	multiplexer multiplexer

	mu         sync.Mutex
	broadcasts map[key]*watchBroadcast
	// initialEvents holds the streams without a first frame, by request. Later only their members refer to them.
	initialEvents map[string]*initialEventsQueue
	// bufferedBytes is the size of all frames buffered for shared initial events, limited by
	// Config.BroadcastTotalBytes.
	bufferedBytes atomic.Int64
	// startDelay is how long shared initial events wait for the running stream's first frame. 0: defaultStartDelay.
	startDelay time.Duration
}

type key [sha256.Size]byte

// keyOf returns the key of the broadcast for a query and an owner. Owners have separate broadcasts, because a replica
// delays the large events of an owner with many streams. Watches of other owners must not wait behind these events. The
// crd_revision is not part of the key, because the source ends the watches of a changed CRD.
func keyOf(q *watchfanoutv1.Query, owner string) (key, error) {
	identity := &watchfanoutv1.Query{
		Resource:      q.Resource,
		Namespace:     q.Namespace,
		LabelSelector: q.LabelSelector,
		FieldSelector: q.FieldSelector,
		Output:        q.Output,
		IncludeObject: q.IncludeObject,
		Shard:         q.Shard,
	}
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(identity)
	if err != nil {
		return key{}, err
	}
	ownerHash := sha256.Sum256([]byte(owner))
	return sha256.Sum256(append(ownerHash[:], data...)), nil
}

// joinBroadcast adds a receiver to the broadcast of a query. If there is none, it starts a broadcast at position. It
// does so only if the tier has reached position, because a client may name any revision and others must not wait for
// it. It returns nil if no broadcast holds the events after position.
func (h *Hub) joinBroadcast(k key, w *clientWatch, position events.Position) (*watchBroadcast, *receiver) {
	r := w.Request
	h.mu.Lock()
	defer h.mu.Unlock()
	b := h.broadcasts[k]
	if !w.place.Reached && b == nil {
		return nil, nil
	}
	if b == nil {
		ctx, cancel := context.WithCancel(context.Background())
		b = &watchBroadcast{
			hub:             h,
			key:             k,
			query:           r.Query,
			storageResource: r.StorageResource,
			owner:           r.Owner,
			Broadcast:       core.NewBroadcast(position),
			cancel:          cancel,
		}
		b.resume = func() { b.run(ctx) }
		if h.broadcasts == nil {
			h.broadcasts = map[key]*watchBroadcast{}
		}
		h.broadcasts[k] = b
		broadcasts.Inc()
		h.MemoryQuota.enter(b)
		go b.resume()
	}
	return b, b.join(w, position)
}

// revisionExists reports whether etcd has reached the client's resourceVersion. A larger revision is from another
// epoch, before a backup was restored. A broadcast would silently skip all events up to it.
func (h *Hub) revisionExists(ctx context.Context, k key, log string, position events.Position) bool {
	h.mu.Lock()
	b := h.broadcasts[k]
	h.mu.Unlock()
	if b == nil || !b.isBehind(position) {
		return true
	}
	if h.Revision == nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, revisionTimeout)
	defer cancel()
	now, err := h.revisions.Get(ctx, log, func(ctx context.Context) (int64, error) { return h.Revision(ctx, log) })
	return err == nil && position.Revision <= now
}

// joinable reports whether a watch at position could join.
func (h *Hub) joinable(k key, position events.Position) bool {
	h.mu.Lock()
	b := h.broadcasts[k]
	h.mu.Unlock()
	if b == nil {
		return true
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.Joinable(position)
}

// drop removes an ended broadcast and cancels its stream.
func (h *Hub) drop(b *watchBroadcast) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.broadcasts[b.key] == b {
		delete(h.broadcasts, b.key)
		broadcasts.Dec()
	}
	b.cancel()
}
