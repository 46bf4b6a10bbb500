package watch

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/rpc"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Fifty informers that begin at once ask the same, and each is to have the whole of it. What they are sent is read once
// for all who ask while the one before has not answered: a flight. It begins after the last of them has asked, so each
// gets what is as fresh as what a stream of its own would bring (platform/coalesce has the same rule). A frame is kept
// until everybody in the flight has taken it; where all flights keep too much, each goes at the pace of its slowest.

const (
	// defaultStartDelay is how long those who ask wait for the flight before theirs to answer.
	defaultStartDelay = 100 * time.Millisecond
	// readAheadFrames is how many frames are read for several before any of them asks.
	readAheadFrames = 4
	// evictTimeout is how long the slowest in a flight may keep the others waiting where there is no room.
	evictTimeout = 5 * time.Second
)

// frameReceiver are what a session goes on with while it is alone.
type frameReceiver interface {
	Recv() (*watchfanoutv1.WatchFrame, error)
}

// sharedInitialEvents is one stream for all who are in it.
type sharedInitialEvents struct {
	hub *Hub

	mu              sync.Mutex
	members         map[*member]struct{} // who have not left
	frames          []bufferedFrame
	base            int // the number of kept[0]
	requestedFrames int // how many frames there are to be
	err             error
	changed         chan struct{} // closed when there is more
	demand          sync.Cond
	evictTimer      *time.Timer // runs while the slowest keeps the others waiting
	cancel          context.CancelFunc
}

// bufferedFrame is a frame, and how many are still to take it.
type bufferedFrame struct {
	frame   *watchfanoutv1.WatchFrame
	readers int
}

// initialEventsQueue are those of one question: ahead has begun and not answered, and next is for those who ask now.
type initialEventsQueue struct{ running, next *sharedInitialEvents }

// member is one session's part in a flight.
type member struct {
	ctx           context.Context
	initialEvents *sharedInitialEvents
	nextFrame     int
	err           error // why its part has ended before the flight
}

// joinInitialEvents has the watch begin with others of its owner that ask the same; leave says that it goes on by itself.
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
		queue.next = newInitialEvents(h)
	}
	e := queue.next
	p = &member{ctx: ctx, initialEvents: e}
	e.mu.Lock()
	e.members[p] = struct{}{}
	onlyMember := len(e.members) == 1
	e.mu.Unlock()
	if first {
		h.startNext(ctx, queryKey, queue, storageResource, r)
	} else if onlyMember {
		running := queue.running
		detachedCtx := context.WithoutCancel(ctx)
		delay := h.startDelay
		if delay == 0 {
			delay = defaultStartDelay
		}
		time.AfterFunc(delay, func() { h.startNextAfter(detachedCtx, queryKey, running, storageResource, r) })
	}
	h.mu.Unlock()
	return p, p.leave, nil
}

func newInitialEvents(h *Hub) *sharedInitialEvents {
	e := &sharedInitialEvents{hub: h, members: map[*member]struct{}{}, changed: make(chan struct{}), cancel: func() {}}
	e.demand.L = &e.mu
	return e
}

// startNext begins the next flight, or forgets the question where nobody waits for one. The hub's lock is held.
func (h *Hub) startNext(ctx context.Context, queryKey string, queue *initialEventsQueue, storageResource string,
	r *watchfanoutv1.WatchRequest) {
	e := queue.next
	queue.running, queue.next = e, nil
	if e == nil {
		delete(h.initialEvents, queryKey)
		return
	}
	detachedCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	e.mu.Lock()
	e.cancel = cancel
	empty := len(e.members) == 0
	e.mu.Unlock()
	if empty {
		cancel()
	}
	go e.run(detachedCtx, storageResource, r, func() { h.startNextAfter(detachedCtx, queryKey, e, storageResource, r) })
}

// startNextAfter says that a flight has answered, or is not waited for any longer: the next one begins.
func (h *Hub) startNextAfter(ctx context.Context, queryKey string, e *sharedInitialEvents, storageResource string,
	r *watchfanoutv1.WatchRequest) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if queue := h.initialEvents[queryKey]; queue != nil && queue.running == e {
		h.startNext(ctx, queryKey, queue, storageResource, r)
	}
}

// run reads the stream, as far as anybody asks for it.
func (e *sharedInitialEvents) run(
	ctx context.Context,
	storageResource string,
	r *watchfanoutv1.WatchRequest,
	onFirstFrame func(),
) {
	stream, err := e.hub.Client.Watch(rpc.WithHashKey(ctx, storageResource), r, grpc.WaitForReady(false))
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

// add adds a frame or the error that there is in place of one, and waits until another is asked for; false where none
// will be.
func (e *sharedInitialEvents) add(m *watchfanoutv1.WatchFrame, err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if err != nil {
		e.err = err
	} else if n := len(e.members); n > 0 {
		e.frames = append(e.frames, bufferedFrame{m, n})
		e.hub.bufferedBytes.Add(frameBytes(m))
	}
	e.notify()
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

// notify has everybody look again. The lock is held.
func (e *sharedInitialEvents) notify() {
	close(e.changed)
	e.changed = make(chan struct{})
}

// overQuota says whether there is no room for more: then the slowest says how fast the flight goes. The lock is held.
func (e *sharedInitialEvents) overQuota() bool {
	return len(e.frames) > 0 && e.hub.bufferedBytes.Load() > e.hub.Config.BroadcastTotalBytes
}

// evict ends the part of those who have not taken the frame that the others wait behind: what they were sent of the
// initial events cannot be taken back, so they ask anew.
func (e *sharedInitialEvents) evict(base int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.evictTimer = nil
	if e.overQuota() && e.base == base && len(e.members) > 1 {
		for p := range e.members {
			if p.nextFrame == base {
				e.remove(p)
				p.err = errTooSlow
			}
		}
	}
	e.notify()
	e.demand.Signal()
}

var errTooSlow = status.Error(codes.Unavailable, "the watch is too slow for those who share its beginning")

func frameBytes(m *watchfanoutv1.WatchFrame) (n int64) {
	for _, p := range m.Initial {
		n += int64(len(p))
	}
	return n + int64(len(m.Data))
}

// releaseFrame notes that one who was to take the frame with some number has it, or needs it no more. The lock is held.
func (e *sharedInitialEvents) releaseFrame(number int) {
	e.frames[number-e.base].readers--
	for len(e.frames) > 0 && e.frames[0].readers == 0 {
		e.hub.bufferedBytes.Add(-frameBytes(e.frames[0].frame))
		e.frames[0].frame = nil
		e.frames = e.frames[1:]
		e.base++
		e.demand.Signal()
	}
}

// Recv is the next frame.
func (p *member) Recv() (*watchfanoutv1.WatchFrame, error) {
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
		changed := e.changed
		e.mu.Unlock()
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

// leave ends the session's part. It must not be called while Recv is.
func (p *member) leave() {
	e := p.initialEvents
	e.hub.mu.Lock() // it may not have begun
	defer e.hub.mu.Unlock()
	e.mu.Lock()
	defer e.mu.Unlock()
	e.remove(p)
}

// remove takes a member out. The lock is held.
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
