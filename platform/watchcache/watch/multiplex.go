package watch

import (
	"context"
	"errors"
	"io"
	"sync"
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
// wake is called by an event of the watch's trigger, by the multiplexer's ticks, by the caller's end of the watch, and
// when the process drains.
type Multiplexer struct {
	// ServerOf returns the server of a resource's watches.
	ServerOf func(*commonv1.Resource) (*Server, error)
	// ProgressPeriod is how often a watch receives the cache's revision.
	ProgressPeriod time.Duration
	// Draining is closed when every watch must end with UNAVAILABLE.
	Draining <-chan struct{}
}

// A call with many watches divides the period of bookmarks in at most maxTicks, so that not all watches send at once.
const (
	maxTicks       = 16
	watchesPerTick = 64
)

// Watches serves a call. It ends with the caller, or when the process drains after its watches have ended.
func (m *Multiplexer) Watches(
	stream grpc.BidiStreamingServer[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]) error {
	ctx, cancel := context.WithCancel(stream.Context())
	c := &call{Multiplexer: m, ctx: ctx, stream: stream, watches: map[uint64]*multiplexedWatch{}}
	defer c.drain()
	defer cancel()
	received := make(chan error, 1)
	go func() { received <- c.receive() }()
	period := max(m.ProgressPeriod, time.Millisecond)
	tick := time.NewTimer(period)
	defer tick.Stop()
	for n, ticks := uint64(0), uint64(1); ; {
		select {
		case err := <-received:
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-m.Draining:
			c.drain()
			return rpc.ErrDraining
		case <-tick.C:
			if n++; n >= ticks {
				n, ticks = 0, c.ticks()
			}
			tick.Reset(period / time.Duration(ticks))
			c.tick(n, ticks)
		}
	}
}

// call is a call of Watches.
type call struct {
	*Multiplexer
	ctx   context.Context
	ended sync.WaitGroup // of the watches

	// sending serializes stream's Send. A large message takes large first, so a small message waits for a single large
	// message at most.
	sending, large sync.Mutex
	stream         grpc.BidiStreamingServer[watchfanoutv1.WatchesRequest, watchfanoutv1.WatchFrame]

	mu      sync.Mutex
	watches map[uint64]*multiplexedWatch
	drained bool
}

// receive begins and ends watches as the caller requests, until the stream ends.
func (c *call) receive() error {
	for {
		r, err := c.stream.Recv()
		if err != nil {
			return err
		}
		if r.Watch == nil {
			c.mu.Lock()
			w := c.watches[r.WatchId]
			c.mu.Unlock()
			if w != nil {
				w.cancel()
				w.wake()
			}
		} else if err := c.begin(r); err != nil {
			return err
		}
	}
}

// begin starts a watch.
func (c *call) begin(r *watchfanoutv1.WatchesRequest) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.watches[r.WatchId] != nil {
		return status.Errorf(codes.InvalidArgument, "watch %d is open", r.WatchId)
	}
	if c.drained {
		return rpc.ErrDraining
	}
	w := &multiplexedWatch{call: c, id: r.WatchId, request: r.Watch}
	w.ctx, w.cancel = context.WithCancel(c.ctx)
	c.watches[w.id] = w
	c.ended.Add(1)
	go w.run()
	return nil
}

// ticks returns the number of ticks in the next period.
func (c *call) ticks() uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return min(maxTicks, uint64(len(c.watches))/watchesPerTick+1)
}

// tick makes a bookmark due for a part of the watches. Idle watches need no goroutine for it.
func (c *call) tick(part, ticks uint64) {
	c.mu.Lock()
	var due []*multiplexedWatch
	for id, w := range c.watches {
		if id%ticks == part {
			due = append(due, w)
		}
	}
	c.mu.Unlock()
	for _, w := range due {
		w.tick()
	}
}

// drain lets every watch end, and lets no other watch begin. A watch sends its pending events if the caller is still
// there.
func (c *call) drain() {
	c.mu.Lock()
	c.drained = true
	for _, w := range c.watches {
		w.wake()
	}
	c.mu.Unlock()
	c.ended.Wait()
}

// end removes a watch and sends its status.
func (c *call) end(w *multiplexedWatch, err error) {
	defer c.ended.Done()
	defer w.cancel()
	c.mu.Lock()
	delete(c.watches, w.id)
	c.mu.Unlock()
	s := status.Convert(endOf(err)).Proto()
	_ = w.Send(&watchfanoutv1.WatchFrame{Status: &watchfanoutv1.WatchStatus{
		Code:    s.GetCode(),
		Message: s.GetMessage(),
		Details: s.GetDetails(),
		Unready: errors.Is(err, rpc.ErrDraining) || w.watcher != nil && w.watcher.server.checkFresh() != nil,
	}})
}

// multiplexedWatch is a watch of a call. The goroutine that runs it owns the fields without mu.
type multiplexedWatch struct {
	call    *call
	id      uint64
	ctx     context.Context
	cancel  context.CancelFunc
	request *watchfanoutv1.WatchRequest // until it has started
	watcher *watcher

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
// because an event may wait for its owner's quota, and the other watches' bookmarks would wait too.
func (w *multiplexedWatch) tick() {
	w.mu.Lock()
	w.ticked = true
	idle := w.parked
	w.parked, w.woken = false, !idle
	w.mu.Unlock()
	if idle && !w.sendBookmark() {
		go w.run()
	}
}

// sendBookmark sends a bookmark and parks the watch. It returns false if there is something else to do.
func (w *multiplexedWatch) sendBookmark() (parked bool) {
	defer func() {
		if r := recover(); r != nil { // run will panic again, and recover
			parked = false
		}
	}()
	events, _, progress, _, ok := w.watcher.events.Next(cache.Cursor(w.watcher.cursor.Load()), 1)
	if !ok || len(events) > 0 || !w.watcher.mayReport(progress) || w.watcher.server.checkFresh() != nil {
		return false
	}
	w.takeTick()
	return w.watcher.sendProgress(progress) == nil && w.park()
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
		if w.takeTick() {
			if err := w.watcher.server.checkFresh(); err != nil {
				return false, err
			}
			w.watcher.bookmarkDue = true
		}
		if _, _, err := w.watcher.sendPending(w.ctx); err != nil {
			return false, err
		}
		select {
		case <-w.ctx.Done():
			return false, status.FromContextError(w.ctx.Err()).Err()
		case <-w.watcher.server.draining:
			return false, rpc.ErrDraining
		case <-w.call.Draining:
			return false, rpc.ErrDraining
		default:
		}
		if w.park() {
			return true, nil
		}
	}
}

func (w *multiplexedWatch) start() error {
	s, err := w.call.ServerOf(w.request.GetQuery().GetResource())
	if err != nil {
		return err
	}
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
