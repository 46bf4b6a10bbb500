package watch

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchable"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/turns"
)

// Shared initial events. Fifty informers that start together send equal requests, and each needs all objects. A watch
// that arrives while a stream of its query has no first frame yet joins the next stream. That stream starts after its
// last member has joined, so its data is as fresh as a private stream's (platform/coalesce has the same rule).
//
// A frame stays in memory until every member has received it. If the buffer is full, the stream proceeds at the pace of
// its slowest member. Lock order: Hub.mu, then sharedInitialEvents.mu.

const (
	// defaultStartDelay is how long a watch waits for the first frame of the stream before its own.
	defaultStartDelay = 100 * time.Millisecond
	// readAheadFrames is how many frames are read in advance if a stream has several members.
	readAheadFrames = 4
	// evictTimeout is how long the slowest member may delay the others while the buffer is full.
	evictTimeout = 5 * time.Second
)

// sharedInitialEvents is a stream that all its members receive.
//
//	queued --- first frame of the previous stream, or startDelay ---> running.
//	running --- stream ended, or no member left ---> ended.
//
// The goroutine of run reads frames while members request them. A member leaves by itself, or evict removes it.
type sharedInitialEvents struct {
	hub *Hub
	// ctx has the values of the first member's request, and not its end.
	ctx context.Context

	mu              sync.Mutex
	members         map[*member]struct{} // without members that have left
	frames          []bufferedFrame
	base            int // the number of frames[0]
	requestedFrames int // how many frames run should read
	err             error
	changed         watchable.Signal // a frame or an error is added
	demand          sync.Cond
	evictTimer      *time.Timer // runs while the slowest member delays the others
	cancel          context.CancelFunc
}

// bufferedFrame is a frame and the number of members that have not received it.
type bufferedFrame struct {
	frame   *sharedFrame
	readers int
}

// initialEventsQueue holds the streams of a request. running has started and has no first frame yet; next collects
// members.
type initialEventsQueue struct{ running, next *sharedInitialEvents }

// member is a watch's part in shared initial events.
type member struct {
	ctx           context.Context
	initialEvents *sharedInitialEvents
	nextFrame     int
	err           error // why its part ended before the stream
}

// joinInitialEvents adds the watch to the initial events that its owner's equal watches share. The caller must call
// leave when it stops receiving.
func (h *Hub) joinInitialEvents(
	ctx context.Context,
	storageResource string,
	r *watchfanoutv1.WatchRequest,
) (p *member, leave func(),
	err error) {
	data, err := proto.MarshalOptions{Deterministic: true}.Marshal(r)
	if err != nil {
		return nil, nil, err
	}
	queryKey := string(data)
	h.mu.Lock()
	queue := h.initialEvents[queryKey]
	first := queue == nil
	if first {
		queue = &initialEventsQueue{}
		if h.initialEvents == nil {
			h.initialEvents = map[string]*initialEventsQueue{}
		}
		h.initialEvents[queryKey] = queue
	}
	if queue.next == nil {
		queue.next = newInitialEvents(context.WithoutCancel(ctx), h)
	}
	e := queue.next
	p = &member{ctx: ctx, initialEvents: e}
	e.mu.Lock()
	e.members[p] = struct{}{}
	onlyMember := len(e.members) == 1
	e.mu.Unlock()
	if first {
		h.startNext(queryKey, queue, storageResource, r)
	} else if onlyMember {
		running := queue.running
		delay := h.startDelay
		if delay == 0 {
			delay = defaultStartDelay
		}
		time.AfterFunc(delay, func() { h.startNextAfter(queryKey, running, storageResource, r) })
	}
	h.mu.Unlock()
	return p, p.leave, nil
}

func newInitialEvents(ctx context.Context, h *Hub) *sharedInitialEvents {
	e := &sharedInitialEvents{hub: h, ctx: ctx, members: map[*member]struct{}{}, cancel: func() {}}
	e.demand.L = &e.mu
	return e
}

// startNext starts the next stream, or removes the queue if no watch has joined it. The hub's lock is held.
func (h *Hub) startNext(queryKey string, queue *initialEventsQueue, storageResource string,
	r *watchfanoutv1.WatchRequest) {
	e := queue.next
	queue.running, queue.next = e, nil
	if e == nil {
		delete(h.initialEvents, queryKey)
		return
	}
	ctx, cancel := context.WithCancel(e.ctx)
	e.mu.Lock()
	e.cancel = cancel
	empty := len(e.members) == 0
	e.mu.Unlock()
	if empty {
		cancel()
	}
	go e.run(ctx, storageResource, r, func() { h.startNextAfter(queryKey, e, storageResource, r) })
}

// startNextAfter starts the next stream after e has its first frame or startDelay has passed.
func (h *Hub) startNextAfter(queryKey string, e *sharedInitialEvents, storageResource string,
	r *watchfanoutv1.WatchRequest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if queue := h.initialEvents[queryKey]; queue != nil && queue.running == e {
		h.startNext(queryKey, queue, storageResource, r)
	}
}

// run reads frames from the stream while members request them.
func (e *sharedInitialEvents) run(
	ctx context.Context,
	storageResource string,
	r *watchfanoutv1.WatchRequest,
	onFirstFrame func(),
) {
	stream, err := e.hub.openStream(rpc.WithHashKey(ctx, storageResource), r)
	for first := true; ; first = false {
		var m *watchfanoutv1.WatchFrame
		if err == nil {
			m, err = stream.Recv()
		}
		if first {
			onFirstFrame()
		}
		if !e.add(m, err) {
			return
		}
	}
}

// add adds a frame, or the error that ended the stream, and waits until a member requests another frame. It returns
// false if run should stop.
func (e *sharedInitialEvents) add(m *watchfanoutv1.WatchFrame, err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.err = err
	} else if n := len(e.members); n > 0 {
		f := newSharedFrame(m)
		e.frames = append(e.frames, bufferedFrame{f, n})
		e.hub.bufferedBytes.Add(e.hub.frameBytes(f))
	}
	e.changed.Notify()
	for e.err == nil && len(e.members) > 0 {
		overQuota := e.overQuota()
		if !overQuota && e.base+len(e.frames) < e.requestedFrames {
			return true
		}
		if overQuota && e.evictTimer == nil {
			base := e.base
			e.evictTimer = time.AfterFunc(evictTimeout, func() { e.evict(base) })
		}
		e.demand.Wait()
	}
	return false
}

// overQuota reports whether the buffer is full, so that the slowest member sets the pace. The lock is held.
func (e *sharedInitialEvents) overQuota() bool {
	return len(e.frames) > 0 && e.hub.bufferedBytes.Load() > e.hub.Config.BroadcastTotalBytes
}

// evict removes the slowest members if they still delay another member since base. Initial events that were sent cannot
// be taken back, so the clients of removed members must watch again. A member that waits for a turn stays.
func (e *sharedInitialEvents) evict(base int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.evictTimer = nil
	if e.overQuota() && e.base == base && e.frames[0].readers < len(e.members) {
		for p := range e.members {
			if p.nextFrame == base && !turns.Waiting(p.ctx) {
				e.remove(p)
				p.err = errTooSlow
			}
		}
	}
	e.changed.Notify()
	e.demand.Signal()
}

var errTooSlow = status.Error(codes.Unavailable, "the watch is too slow to share its initial events with other watches")

// frameBytes returns the size of a frame. With compression, its initial events may be held twice.
func (h *Hub) frameBytes(m *sharedFrame) (n int64) {
	for _, p := range m.Initial {
		n += int64(len(p))
	}
	if h.Config.Compression {
		n *= 2
	}
	return n + int64(len(m.Data))
}

// releaseFrame records that a member has received frame `number` or no longer needs it. The lock is held.
func (e *sharedInitialEvents) releaseFrame(number int) {
	e.frames[number-e.base].readers--
	for len(e.frames) > 0 && e.frames[0].readers == 0 {
		e.hub.bufferedBytes.Add(-e.hub.frameBytes(e.frames[0].frame))
		e.frames[0].frame = nil
		e.frames = e.frames[1:]
		e.base++
		e.demand.Signal()
	}
}

// Recv returns the next frame.
func (p *member) Recv() (*sharedFrame, error) {
	e := p.initialEvents
	e.mu.Lock()
	defer e.mu.Unlock()
	for {
		if p.err != nil {
			return nil, p.err
		}
		readAhead := readAheadFrames
		if len(e.members) == 1 {
			readAhead = 1
		}
		if e.requestedFrames < p.nextFrame+readAhead {
			e.requestedFrames = p.nextFrame + readAhead
			e.demand.Signal()
		}
		if i := p.nextFrame - e.base; i < len(e.frames) {
			m := e.frames[i].frame
			e.releaseFrame(p.nextFrame)
			p.nextFrame++
			return m, nil
		}
		if e.err != nil {
			return nil, e.err
		}
		changed := e.changed.C()
		e.mu.Unlock()
		turns.Yield(p.ctx) // the next frame may wait for another member, and that member for a turn
		select {
		case <-changed:
		case <-p.ctx.Done():
		}
		e.mu.Lock()
		if err := p.ctx.Err(); err != nil {
			return nil, status.FromContextError(err).Err()
		}
	}
}

// leave removes the member. It must not run while Recv does.
func (p *member) leave() {
	e := p.initialEvents
	e.hub.mu.Lock() // the stream may not have started
	defer e.hub.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.remove(p)
}

// remove removes a member. The lock is held.
func (e *sharedInitialEvents) remove(p *member) {
	if _, ok := e.members[p]; !ok {
		return
	}
	delete(e.members, p)
	for end := e.base + len(e.frames); p.nextFrame < end; p.nextFrame++ {
		e.releaseFrame(p.nextFrame)
	}
	if len(e.members) == 0 {
		e.cancel()
		e.demand.Signal()
	}
}
