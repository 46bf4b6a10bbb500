package watch

import (
	"context"
	"errors"
	"io"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Multiplexer serves calls of Watches: many watches on a stream. A watch has a goroutine only while it has something
// to do.
//
//	running --- park ---> parked --- wake ---> running --- ended.
//
// An event of the watch's trigger, the caller's end of the watch, and Drain call wake. The call's timer calls tick,
// which starts the watch only if it has more to do than send a bookmark.
type Multiplexer struct {
	// ServerOf returns the server of a resource's watches.
	ServerOf func(*commonv1.Resource) (*Server, error)
	// ProgressPeriod is how often a watch receives the cache's revision. The period is up to maxPeriods times as long
	// in a call of bookmarksPerCall watches or more, or if all calls have bookmarksPerReplica or more.
	ProgressPeriod time.Duration

	// open is the number of watches of all calls.
	open atomic.Int64

	mu       sync.Mutex
	calls    map[*call]struct{}
	draining bool
}

const (
	// bookmarksPerCall bounds the bookmarks that a call sends in a ProgressPeriod, and bookmarksPerReplica the
	// bookmarks of all calls. A round takes at most maxPeriods, also beyond these bounds, because clients expect a
	// bookmark a minute.
	bookmarksPerCall    = 128
	bookmarksPerReplica = 1024
	maxPeriods          = 10
	// A call with many watches divides a ProgressPeriod into at most maxTicks, so that not all watches send at once.
	maxTicks       = 16
	watchesPerTick = 64
	// In a call of fewer than bookmarksPerCall watches, a watch gets a bookmark at each tick of its first youngPeriods,
	// also if the replica has many watches. It is not 1, because the gateway sends no bookmark in a watch's first
	// second.
	youngPeriods = 2
)

// schedule returns the number of ticks in which each of a call's n watches gets a bookmark, and the time between two
// ticks. All calls have `all` watches.
func (m *Multiplexer) schedule(n, all int) (ticks uint64, interval time.Duration) {
	periods := min(maxPeriods, max(n/bookmarksPerCall, all/bookmarksPerReplica)+1)
	perPeriod := min(maxTicks, n/periods/watchesPerTick+1)
	return uint64(periods * perPeriod), m.ProgressPeriod / time.Duration(perPeriod)
}

// Watches serves a call until the caller ends it.
func (m *Multiplexer) Watches(
	stream grpc.BidiStreamingServer[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	c := &call{Multiplexer: m, ctx: ctx, stream: stream, watches: map[uint64]*multiplexedWatch{}, ticks: 1,
		interval: m.ProgressPeriod, phase: rand.Uint64N(maxPeriods * maxTicks)}
	c.mu.Lock()
	c.timer = time.AfterFunc(m.ProgressPeriod, c.tick)
	c.mu.Unlock()
	m.add(c)
	defer func() {
		m.remove(c)
		cancel()
		c.drain()
		c.tasks.Wait()
	}()
	for {
		r, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = c.handle(r)
		}
		if err != nil {
			return err
		}
	}
}

// Drain ends every watch with UNAVAILABLE after its pending events, and begins none. The caller ends a call without
// watches.
func (m *Multiplexer) Drain() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.draining = true
	for c := range m.calls {
		c.drain()
	}
}

func (m *Multiplexer) add(c *call) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.calls == nil {
		m.calls = map[*call]struct{}{}
	}
	m.calls[c] = struct{}{}
	if m.draining {
		c.drain()
	}
}

func (m *Multiplexer) remove(c *call) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.calls, c)
}

// call is a call of Watches. Lock order: Multiplexer.mu, call.mu, multiplexedWatch.mu.
type call struct {
	*Multiplexer
	ctx   context.Context
	tasks sync.WaitGroup // the watches and a running tick

	// sending serializes stream's Send. A large message takes large first, so a small message waits for a single large
	// message at most.
	sending, large sync.Mutex
	stream         grpc.BidiStreamingServer[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]

	mu      sync.Mutex
	watches map[uint64]*multiplexedWatch
	drained bool // watches end, and no watch begins
	timer   *time.Timer
	// The current round of bookmarks has ticks ticks, and ticked of them have passed. phase is random, so that calls
	// that begin together do not send in the same tick.
	ticked, ticks, phase uint64
	interval             time.Duration
}

// handle begins or ends a watch.
func (c *call) handle(r *watchfanoutv1.WatchesRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.watches[r.WatchId]
	switch {
	case r.Watch == nil && w != nil:
		w.cancel()
		w.wake()
	case r.Watch != nil && w != nil:
		return status.Errorf(codes.InvalidArgument, "watch %d is open", r.WatchId)
	case r.Watch != nil:
		w = &multiplexedWatch{call: c, id: r.WatchId, request: r.Watch, began: time.Now()}
		w.ctx, w.cancel = context.WithCancel(c.ctx)
		c.watches[w.id] = w
		c.open.Add(1)
		c.tasks.Add(1)
		go w.run()
	}
	return nil
}

// tick makes a bookmark due for a part of the watches, and for every watch whose cache is stale. Idle watches need no
// goroutine for it.
func (c *call) tick() {
	c.mu.Lock()
	if c.drained {
		c.mu.Unlock()
		return
	}
	c.tasks.Add(1)
	defer c.tasks.Done()
	ticks, interval := c.schedule(len(c.watches), int(c.open.Load()))
	// the round has ended, or there are less than half as many watches
	if c.ticked++; c.ticked >= c.ticks || ticks < c.ticks/2 {
		c.ticked, c.ticks, c.interval = 0, ticks, interval
	}
	// The watches of other calls must not delay a first bookmark, because a client resumes from it. A call with many
	// watches has long rounds of its own.
	now, few := time.Now(), len(c.watches) < bookmarksPerCall
	var due []*multiplexedWatch
	for id, w := range c.watches {
		stale := w.server != nil && w.server.checkFresh() != nil
		young := few && now.Sub(w.began) < youngPeriods*c.ProgressPeriod
		if stale || young || (id+c.phase)%c.ticks == c.ticked {
			due = append(due, w)
		}
	}
	c.mu.Unlock()
	for _, w := range due {
		w.tick()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.drained {
		c.timer.Reset(c.interval)
	}
}

// drain lets every watch end, and lets no other watch begin. A watch sends its pending events if the caller is still
// there.
func (c *call) drain() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drained = true
	c.timer.Stop()
	for _, w := range c.watches {
		w.wake()
	}
}

func (c *call) isDrained() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.drained
}

// end removes a watch and sends its status.
func (c *call) end(w *multiplexedWatch, err error) {
	defer c.tasks.Done()
	defer w.cancel()
	c.mu.Lock()
	delete(c.watches, w.id)
	c.mu.Unlock()
	c.open.Add(-1)
	s := status.Convert(endOf(err)).Proto()
	_ = w.Send(&watchfanoutv1.WatchFrame{Status: &watchfanoutv1.WatchStatus{
		Code:    s.GetCode(),
		Message: s.GetMessage(),
		Details: s.GetDetails(),
		Unready: errors.Is(err, rpc.ErrDraining) || w.watcher != nil && w.watcher.server.checkFresh() != nil,
	}})
}

// multiplexedWatch is a watch of a call. The goroutine that has set parked to false, or has begun the watch, owns the
// fields that have no lock.
type multiplexedWatch struct {
	call    *call
	id      uint64
	began   time.Time
	ctx     context.Context
	cancel  context.CancelFunc
	request *watchfanoutv1.WatchRequest // until it has started
	watcher *watcher
	server  *Server // under call.mu; nil until the watch starts

	mu sync.Mutex
	// parked: no goroutine runs the watch. woken: it was woken while it ran. ticked: a bookmark is due.
	parked, woken, ticked bool
}

// Context implements sender.
func (w *multiplexedWatch) Context() context.Context { return w.ctx }

// Send implements sender.
func (w *multiplexedWatch) Send(m *watchfanoutv1.WatchFrame) error {
	m.WatchId = w.id
	w.call.sending.Lock()
	defer w.call.sending.Unlock()
	return w.call.stream.Send(m)
}

// SendMsg implements sender.
func (w *multiplexedWatch) SendMsg(m any) error {
	m.(*rpc.TrackedFrame).WatchId = w.id
	w.call.large.Lock()
	defer w.call.large.Unlock()
	w.call.sending.Lock()
	defer w.call.sending.Unlock()
	return w.call.stream.SendMsg(m)
}

// wake makes the watch's goroutine check everything again, and starts it if the watch is parked. It takes no lock but
// w.mu.
func (w *multiplexedWatch) wake() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.parked {
		w.parked = false
		go w.run()
	} else {
		w.woken = true
	}
}

// tick makes a bookmark due. It sends the bookmark of an idle watch, which then needs no goroutine. It sends no event,
// because an event may wait for its owner's quota, and the other watches' bookmarks would wait too. A watch whose cache
// is stale ends.
func (w *multiplexedWatch) tick() {
	w.mu.Lock()
	w.ticked = true
	idle := w.parked
	w.parked, w.woken = false, !idle
	w.mu.Unlock()
	if !idle {
		return
	}
	if w.watcher.server.checkFresh() == nil {
		if parked, err := w.sendBookmark(); err == nil && parked {
			return
		}
	}
	go w.run()
}

// sendBookmark sends a bookmark and parks the watch. It returns false if there is something else to do.
func (w *multiplexedWatch) sendBookmark() (parked bool, err error) {
	defer recovery.ToError("the bookmark of a watch", &err)
	events, _, progress, _, ok := w.watcher.events.Next(cache.Cursor(w.watcher.cursor.Load()), 1)
	if !ok || len(events) > 0 || !w.watcher.mayReport(progress) {
		return false, nil
	}
	w.takeTick()
	if err := w.watcher.sendProgress(progress); err != nil {
		return false, err
	}
	return w.park(), nil
}

// run runs the watch until it is parked or ends.
func (w *multiplexedWatch) run() {
	parked, err := w.runRecovered()
	if parked {
		return
	}
	if w.watcher != nil {
		if closeErr := w.closeRecovered(); err == nil {
			err = closeErr
		}
	}
	w.call.end(w, err)
}

func (w *multiplexedWatch) closeRecovered() (err error) {
	defer recovery.ToError("the end of a watch", &err)
	w.watcher.close()
	return nil
}

func (w *multiplexedWatch) runRecovered() (parked bool, err error) {
	defer recovery.ToError("a watch", &err)
	if w.watcher == nil {
		if err := w.start(); err != nil {
			return false, err
		}
	}
	for {
		drained := w.call.isDrained()
		if w.takeTick() || drained { // another replica resumes from the last bookmark
			if err := w.watcher.server.checkFresh(); err != nil {
				return false, err
			}
			w.watcher.bookmarkDue = true
		}
		if _, _, err := w.watcher.sendPending(w.ctx); err != nil {
			return false, err
		}
		if err := w.ctx.Err(); err != nil {
			return false, status.FromContextError(err).Err()
		}
		if drained {
			return false, rpc.ErrDraining
		}
		if w.park() {
			return true, nil
		}
	}
}

func (w *multiplexedWatch) start() error {
	if w.call.isDrained() {
		return rpc.ErrDraining
	}
	s, err := w.call.ServerOf(w.request.GetQuery().GetResource())
	if err != nil {
		return err
	}
	w.call.mu.Lock()
	w.server = s // tick ends the watch if its cache is stale
	w.call.mu.Unlock()
	if w.watcher, err = s.open(w.request, w); err != nil {
		return err
	}
	w.request = nil
	return w.watcher.start(w.ctx)
}

// park lets the goroutine end, unless an event is pending or the watch was woken meanwhile.
func (w *multiplexedWatch) park() bool {
	if !w.watcher.events.Await(cache.Cursor(w.watcher.cursor.Load()), w.wake) {
		return false
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.woken {
		w.woken = false
		return false
	}
	w.parked = true
	return true
}

// takeTick returns whether a bookmark is due.
func (w *multiplexedWatch) takeTick() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	ticked := w.ticked
	w.ticked = false
	return ticked
}
