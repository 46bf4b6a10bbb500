package source_test

import (
	"context"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/source"
)

// mostReads is how many calls of ReadLog run at a time.
const mostReads = 128

// newSource returns a source with a main log.
func newSource(log eventlog.StreamReader) *source.Source {
	return source.New(nil, nil, map[eventlog.LogID]eventlog.StreamReader{eventlog.Main: log})
}

// endless is a log without end.
type endless struct{}

func (endless) Messages(ctx context.Context, _ *logv1.ReadRequest, each func(*logv1.Chunk) error) error {
	return endlessOf(ctx, each, &logv1.Chunk{})
}

func endlessOf(ctx context.Context, each func(*logv1.Chunk) error, c *logv1.Chunk) error {
	for ctx.Err() == nil {
		if err := each(c); err != nil {
			return err
		}
	}
	return ctx.Err()
}

// caller receives a chunk after each pause. Without a pause it receives none.
type caller struct {
	grpc.ServerStreamingServer[logv1.Chunk]
	ctx   context.Context
	pause time.Duration
}

func (c *caller) Context() context.Context { return c.ctx }

func (c *caller) SendMsg(m any) error {
	var after <-chan time.Time
	if c.pause > 0 {
		after = time.After(c.pause)
	}
	select {
	case <-after:
		m.(*rpc.Held).Release()
		return nil
	case <-c.ctx.Done():
		return c.ctx.Err()
	}
}

// callers are the calls of a peer. ended holds the error of each call that has ended.
type callers struct {
	source *source.Source
	ctx    context.Context
	pause  time.Duration
	mu     sync.Mutex
	begun  int
	ended  []error
}

func newCallers(ctx context.Context, s *source.Source, ip string, pause time.Duration) *callers {
	from := &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(ip), Port: 1234}}
	return &callers{source: s, ctx: peer.NewContext(ctx, from), pause: pause}
}

// call begins calls, each a millisecond after the other.
func (c *callers) call(n int) {
	for range n {
		c.begun++
		go func() {
			// The server's context ends with the call.
			ctx, end := context.WithCancel(c.ctx)
			defer end()
			err := c.source.ReadLog(&logv1.ReadRequest{}, &caller{ctx: ctx, pause: c.pause})
			c.mu.Lock()
			defer c.mu.Unlock()
			c.ended = append(c.ended, err)
		}()
		time.Sleep(time.Millisecond)
	}
}

// have fails the test unless exactly ended calls have ended, all with the code.
func (c *callers) have(t *testing.T, ended int, code codes.Code) {
	t.Helper()
	synctest.Wait()
	c.mu.Lock()
	defer c.mu.Unlock()
	if n := len(c.ended); n != ended {
		t.Errorf("of %d calls %d have ended, want %d", c.begun, n, ended)
	}
	for _, err := range c.ended {
		if status.Code(err) != code {
			t.Fatal("a call ended with", err)
		}
	}
}

// A slow peer cannot hold all slots: its calls end until another peer runs half of all (N3).
func TestPeersShareThePlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer cancel()
		s := newSource(endless{})
		thief := newCallers(ctx, s, "10.0.0.1", 900*time.Millisecond)
		thief.call(mostReads + 100)
		time.Sleep(time.Minute)
		thief.have(t, 0, codes.OK)
		healthy := newCallers(ctx, s, "10.0.0.2", 2*time.Second)
		healthy.call(mostReads)
		time.Sleep(time.Minute)
		healthy.have(t, 0, codes.OK)
		thief.have(t, mostReads/2, codes.ResourceExhausted)
		// Both run 64 calls now, and each has calls that wait. No call ends for another one.
		thief.call(10)
		healthy.call(10)
		time.Sleep(time.Minute)
		healthy.have(t, 0, codes.OK)
	})
}

// Peers whose numbers of calls differ by 1 at most do not end each other's calls.
func TestEqualPeersEndNoCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer cancel()
		s := newSource(endless{})
		var peers []*callers
		for _, ip := range []string{"10.0.0.1", "2001:db8::1", "fd00::1"} {
			peers = append(peers, newCallers(ctx, s, ip, 2*time.Second))
		}
		for n := range mostReads {
			peers[n%len(peers)].call(1)
		}
		for _, p := range peers { // all of them wait
			p.call(20)
		}
		time.Sleep(10 * time.Minute)
		for _, p := range peers {
			p.have(t, 0, codes.OK)
		}
	})
}

// Addresses of a /64 network are the same peer, because a machine may have all of them.
func TestANetworkIsOnePeer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer cancel()
		s := newSource(endless{})
		slot := newCallers(ctx, s, "2001:db8::1", 900*time.Millisecond)
		other := newCallers(ctx, s, "2001:db8::2", 900*time.Millisecond)
		slot.call(mostReads)
		other.call(1)
		time.Sleep(time.Minute)
		slot.have(t, 0, codes.OK)
	})
}

// Calls that have received nothing for 10 s end for other calls of their peer. Calls that receive a chunk in 9 s do
// not.
func TestStuckCallsMakeRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer cancel()
		s := newSource(endless{})
		stuck, slow := newCallers(ctx, s, "10.0.0.1", 0), newCallers(ctx, s, "10.0.0.1", 9*time.Second)
		stuck.call(3)
		slow.call(mostReads - 3)
		slow.call(5)
		time.Sleep(8 * time.Second)
		stuck.have(t, 0, codes.OK)
		time.Sleep(time.Minute)
		stuck.have(t, 3, codes.ResourceExhausted)
		slow.have(t, 0, codes.OK)
	})
}

// At most 256 calls wait. Beyond that, the last call of the peer with the most waiting calls is refused.
func TestWaitingCallsAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer synctest.Wait()
		defer cancel()
		s := newSource(endless{})
		healthy := newCallers(ctx, s, "10.0.0.2", 500*time.Millisecond)
		healthy.call(mostReads / 2)
		thief := newCallers(ctx, s, "10.0.0.1", 500*time.Millisecond)
		thief.call(mostReads/2 + 256)
		thief.have(t, 0, codes.OK)
		thief.call(7)
		thief.have(t, 7, codes.Unavailable)
		healthy.call(10)
		healthy.have(t, 0, codes.OK)
		thief.have(t, 17, codes.Unavailable)
	})
}

// deaf is a log whose reads continue for an hour after their call is canceled. running counts these.
type deaf struct {
	mu      sync.Mutex
	running int
	most    int
}

func (d *deaf) Messages(context.Context, *logv1.ReadRequest, func(*logv1.Chunk) error) error {
	d.add(1)
	defer d.add(-1)
	time.Sleep(time.Hour)
	return nil
}

func (d *deaf) add(n int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.running += n
	d.most = max(d.most, d.running)
}

// A canceled call keeps its slot until its work has ended. Calls that ended for others have a bound of their own.
func TestCanceledCallsKeepTheirPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		defer synctest.Wait()
		log := &deaf{}
		s := newSource(log)
		for range 10 {
			ctx, cancel := context.WithCancel(t.Context())
			newCallers(ctx, s, "10.0.0.1", time.Second).call(50)
			cancel()
		}
		if log.most != mostReads {
			t.Errorf("%d reads of the log ran at a time", log.most)
		}
		ctx, cancel := context.WithCancel(t.Context())
		for n := range 5 { // each peer ends calls of the peers before it
			newCallers(ctx, s, net.IPv4(10, 0, 1, byte(n)).String(), time.Second).call(40)
		}
		if log.most != 2*mostReads {
			t.Errorf("%d reads of the log ran at a time", log.most)
		}
		cancel()
		time.Sleep(2 * time.Hour)
		if log.running != 0 {
			t.Errorf("%d reads of the log have not ended", log.running)
		}
	})
}

// large is an endless log of chunks of 6 MB.
type large struct{}

func (large) Messages(ctx context.Context, _ *logv1.ReadRequest, each func(*logv1.Chunk) error) error {
	data := make([]byte, 6<<20)
	return endlessOf(ctx, each, &logv1.Chunk{Messages: []*logv1.StoredMessage{{Data: data}}})
}

// queue is a caller whose transport accepts and holds every message.
type queue struct {
	grpc.ServerStreamingServer[logv1.Chunk]
	ctx  context.Context
	held []*rpc.Held
}

func (q *queue) Context() context.Context { return q.ctx }

func (q *queue) SendMsg(m any) error {
	q.held = append(q.held, m.(*rpc.Held))
	return nil
}

// The transport holds 64 MB of unread messages at most, and 32 MB of a peer, also after their calls have ended. A peer
// without unread messages may always have a message.
func TestUnreadBytesAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSource(large{})
		ctx, cancel := context.WithCancel(t.Context())
		var ended []error
		open := func(ip string) *queue {
			q := &queue{ctx: peer.NewContext(ctx, &peer.Peer{Addr: &net.TCPAddr{IP: net.ParseIP(ip)}})}
			go func() { ended = append(ended, s.ReadLog(&logv1.ReadRequest{}, q)) }()
			synctest.Wait()
			return q
		}
		var thief []*queue
		held := func() (n int) {
			synctest.Wait()
			for _, q := range thief {
				n += len(q.held)
			}
			return n
		}
		for range 5 {
			thief = append(thief, open("10.0.0.1"))
		}
		if n := held(); n != 5 {
			t.Errorf("a peer has %d unread messages of 6 MB", n)
		}
		healthy := open("10.0.0.2")
		if n := len(healthy.held); n != 5 {
			t.Errorf("another peer has %d unread messages of 6 MB", n)
		}
		last := open("10.0.0.3")
		if n := len(last.held); n != 1 {
			t.Errorf("a third peer has %d unread messages of 6 MB", n)
		}
		healthy.held[0].Release()
		healthy.held[1].Release() // three peers had 66 MB
		synctest.Wait()
		if n := len(healthy.held); n != 6 || held() != 5 || len(last.held) != 1 {
			t.Errorf("a peer that reads two messages is sent %d, others %d and %d", n, held(), len(last.held))
		}
		// Further messages of the peer wait: five do, and the sixth ends its call.
		for len(ended) == 0 && len(thief) < 20 {
			thief = append(thief, open("10.0.0.1"))
		}
		if len(thief) != 6 || status.Code(ended[0]) != codes.Unavailable {
			t.Errorf("after %d calls: %v", len(thief), ended)
		}
		cancel()
		synctest.Wait()
		ctx = t.Context()
		if n := len(open("10.0.0.1").held); n != 0 {
			t.Errorf("a peer has %d messages while those of ended calls are unread", n)
		}
		for _, q := range append(thief, healthy, last) {
			for _, h := range q.held {
				h.Release()
			}
		}
	})
}

// expired is a log that no longer holds the requested messages.
type expired struct{}

func (expired) Messages(context.Context, *logv1.ReadRequest, func(*logv1.Chunk) error) error {
	return eventlog.ErrExpired
}

// ReadLog returns OUT_OF_RANGE for an expired log, which the watch tier does not retry.
func TestExpiredLogIsOutOfRange(t *testing.T) {
	err := newSource(expired{}).ReadLog(&logv1.ReadRequest{}, &caller{ctx: t.Context()})
	if status.Code(err) != codes.OutOfRange {
		t.Error(err)
	}
}
