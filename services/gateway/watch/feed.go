package watch

import (
	"cmp"
	"context"
	"errors"
	"io"
	"math"
	"slices"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/events"
	"watershed.dev/platform/telemetry"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/wire"
)

// feed is one stream from the watch tier and the clients that share it.
type feed struct {
	hub   *Hub
	key   key
	query *watchfanoutv1.Query
	// storedAs is the query's stored resource.
	storedAs string
	// owner is the user of the client that the feed began with.
	owner string
	// served says whether it is served still.
	served func() bool
	cancel context.CancelFunc

	mu sync.Mutex
	// entries are the recent events.
	entries events.Ring[entry]
	bytes   int
	// Everything after low is in entries. The feed has come to high.
	low, high events.Position
	// bookmark is the newest one: everything up to it has been in entries.
	bookmark entry
	// bookmarks counts them.
	bookmarks int64
	subs      []*subscriber
	ended     bool
	idle      *time.Timer
}

type entry struct {
	data []byte
	at   events.Position
}

// subscriber is one client of a feed. All its fields belong to the feed's lock.
type subscriber struct {
	feed   *feed
	cursor int64
	at     events.Position
	// budget is what its events cost; nil: nothing.
	budget *budget
	// stream is set where events may be written without the client's own goroutine.
	stream *wire.Stream
	// direct: the client has seen everything, so the next event is written to stream as it comes.
	direct bool
	// waits: there was no room on its connection, or nothing left of its user's budget. What comes meanwhile it is sent
	// with the rest, when it is let return. listed: it will be.
	waits, listed bool
	// late: it has waited for the budget since it had last seen everything.
	late bool
	// paid: the entries before this have been taken from the budget, and its own goroutine is to write them.
	paid int64
	// wake tells the client's own goroutine that it has something to do.
	wake      chan struct{}
	bookmarks bool
	// period is how often it gets one.
	period time.Duration
	// marks is which bookmark of the feed's it was sent last.
	marks int64
	// due is when the next bookmark is; zero for none.
	due time.Time
	// skip: events up to here were sent before.
	skip events.Position
}

// join adds a client; nil where what it needs next is gone, or the feed has ended.
func (f *feed) join(at events.Position) *subscriber {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended || at.Before(f.low) || at.DifferentEpoch(f.high) {
		return nil
	}
	next := f.entries.Search(func(e entry) bool { return at.Before(e.at) })
	s := &subscriber{
		feed:   f,
		cursor: next,
		at:     at,
		skip:   at,
		wake:   make(chan struct{}, 1),
	}
	f.subs = append(f.subs, s)
	if f.idle != nil {
		f.idle.Stop()
		f.idle = nil
	}
	shared.Inc()
	return s
}

// forget lets go of the entries of a feed that has ended, once nobody reads them any more.
func (f *feed) forget() {
	if f.ended && len(f.subs) == 0 {
		f.entries = events.Ring[entry]{}
	}
}

// ahead says whether a position is further than the feed has come.
func (f *feed) ahead(at events.Position) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.high.Revision < at.Revision
}

// leave takes a client off and answers its place.
func (f *feed) leave(s *subscriber) events.Position {
	f.mu.Lock()
	defer f.mu.Unlock()
	if i := slices.Index(f.subs, s); i >= 0 {
		last := len(f.subs) - 1
		f.subs[i] = f.subs[last]
		f.subs[last] = nil
		f.subs = f.subs[:last]
		shared.Dec()
	}
	if len(f.subs) == 0 && !f.ended {
		f.idle = time.AfterFunc(linger, f.close)
	}
	s.direct, s.waits = false, false
	f.moveOn(s)
	s.stream = nil // whoever lets it return may do so much later
	f.forget()
	return s.at
}

// moveOn makes the place of a client that has seen everything that of the feed.
func (f *feed) moveOn(s *subscriber) {
	if s.cursor == f.entries.Next() && s.at.Before(f.high) {
		s.at = f.high
	}
}

var (
	// errBehind says that the feed does not hold what comes next: a client has to go on alone for a while.
	errBehind = errors.New("behind")
	// errOverRate says the same of a client that was kept waiting for its user's budget: a stream of its own would cost
	// more than what it waited for, so its watch ends.
	errOverRate = errors.New("behind, for its user's budget")
	// errEnded says that the feed is over: every client has to find out why by itself.
	errEnded = errors.New("the feed has ended")
)

// close ends a feed that nobody has come back to.
func (f *feed) close() {
	f.mu.Lock()
	unused := len(f.subs) == 0
	f.ended = f.ended || unused
	f.mu.Unlock()
	if unused {
		f.hub.drop(f)
	}
}

// next is what comes next for a client: events, or a bookmark that is due. Where there is nothing, events are from now
// on written to its stream as they come, if it has one.
func (f *feed) next(s *subscriber) ([][]byte, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.advance(s)
}

// advance is next, with the lock held.
func (f *feed) advance(s *subscriber) ([][]byte, error) {
	// until it has seen everything; what this answers is written by the client's own goroutine
	s.direct, s.waits = false, false
	if s.cursor < f.entries.Base() {
		return nil, s.behind()
	}
	most := math.MaxInt
	if s.paid > s.cursor {
		most = int(s.paid - s.cursor)
	}
	parts, cursor, at := f.due(s, most, math.MaxInt)
	if s.paid <= s.cursor && len(parts) > 0 && !s.budget.take(time.Now(), costOfParts(parts)) {
		s.waitForBudget()
		return nil, nil
	}
	s.cursor, s.at = cursor, at
	delivered.Add(float64(len(parts)))
	if s.cursor < f.entries.Next() {
		if len(parts) == 0 {
			return f.advance(s)
		}
		return parts, nil
	}
	s.late = false
	if now := time.Now(); f.owes(s, now) {
		parts = append(parts, f.bookmark.data)
		f.marked(s, now.Add(s.period))
	}
	if len(parts) > 0 {
		return parts, nil
	}
	f.moveOn(s)
	if f.ended {
		return nil, errEnded
	}
	s.direct = s.stream != nil
	return nil, nil
}

// due is what comes next for a client, at most so many entries and about so many bytes, and its place after them.
func (f *feed) due(s *subscriber, entries, bytes int) (parts [][]byte, cursor int64, at events.Position) {
	cursor, at = s.cursor, s.at
	for i, e := range f.entries.From(s.cursor) {
		if i >= entries || bytes <= 0 {
			break
		}
		cursor++
		if s.skip.Before(e.at) { // else it was sent before the client came, which may be further than the feed had come
			parts, at = append(parts, e.data), e.at
			bytes -= len(e.data)
		}
	}
	return parts, cursor, at
}

// behind is why a client cannot go on with the feed that does not hold what comes next for it.
func (s *subscriber) behind() error {
	if s.late {
		return errOverRate
	}
	return errBehind
}

// waitForBudget has the client return when something is left of its user's budget.
func (s *subscriber) waitForBudget() {
	s.direct, s.waits, s.late = false, true, true
	if !s.listed {
		s.listed = true
		s.budget.later(s)
	}
}

// waitForRoom has the client return when its connection's queue has room.
func (s *subscriber) waitForRoom() {
	s.direct, s.waits = false, true
	if !s.listed {
		s.listed = true
		s.stream.Later(s)
	}
}

// owes says whether a client that has seen every event is due the newest bookmark.
func (f *feed) owes(s *subscriber, now time.Time) bool {
	return s.bookmarks && s.marks < f.bookmarks && !now.Before(s.due) && !f.bookmark.at.Before(s.at) &&
		!f.bookmark.at.Before(s.skip)
}

// marked notes that the newest bookmark was sent.
func (f *feed) marked(s *subscriber, next time.Time) {
	s.at, s.skip, s.due, s.marks = f.bookmark.at, f.bookmark.at, next, f.bookmarks
}

// bookmarkNow makes a bookmark due now.
func (f *feed) bookmarkNow(s *subscriber) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s.due, s.direct, s.waits = time.Time{}, false, false
}

// broadcast takes what came from the watch tier and writes it to everyone who has seen all before it.
func (f *feed) broadcast(m *watchfanoutv1.WatchFrame) {
	began := time.Now()
	f.mu.Lock()
	defer f.mu.Unlock()
	known := f.entries.Next()
	var traces []string
	begin := int32(0)
	marked := false
	for _, mark := range m.Boundaries {
		e := entry{m.Data[begin:mark.End], events.FromProto(mark.Position)}
		begin = mark.End
		if e.at.Before(f.high) || !mark.Bookmark && !f.high.Before(e.at) {
			continue // the stream took over from another, which had sent it
		}
		if mark.Bookmark {
			f.bookmark, marked = e, true
			f.bookmarks++
			continue
		}
		f.entries.Add(e)
		f.hold(len(e.data) + entryBytes)
		if mark.Traceparent != "" {
			traces = append(traces, mark.Traceparent)
		}
	}
	if p := events.FromProto(m.Position); !p.Before(f.high) {
		p.Epoch = cmp.Or(p.Epoch, f.high.Epoch)
		f.high = p
	}
	fresh := f.entries.From(known)
	if len(fresh) > 0 {
		f.deliver(fresh)
	}
	if marked {
		f.sendBookmarks(time.Now())
	}
	f.trim()
	for _, trace := range traces {
		telemetry.RecordEventSpan(trace, "deliver", began, attribute.Int("watches", len(f.subs)))
	}
}

// entryBytes is what an entry takes beside its data.
const entryBytes = 48

func (f *feed) deliver(fresh []entry) {
	end := f.entries.Next()
	parts := make([][]byte, len(fresh))
	for i, e := range fresh {
		parts[i] = e.data
	}
	last := fresh[len(fresh)-1].at
	n, cost, now := 0, costOfParts(parts), time.Now()
	for _, s := range f.subs {
		switch {
		case s.waits: // it comes for them
		case s.direct && s.cursor == end-int64(len(fresh)) && s.skip.Before(fresh[0].at):
			if f.offer(s, now, cost, end, parts...) {
				s.cursor, s.at = end, last
				n++
			}
		default:
			f.wake(s)
		}
	}
	delivered.Add(float64(n * len(fresh)))
	f.flush()
}

func costOfParts(parts [][]byte) float64 {
	bytes := 0
	for _, p := range parts {
		bytes += len(p)
	}
	return costOf(len(parts), bytes)
}

// offer gives parts to a client that has seen everything before. One whose user's budget is spent, or whose connection
// has no room now, comes later, and one that takes no more itself is its own goroutine's to wait for. end is the place
// after the parts.
func (f *feed) offer(s *subscriber, now time.Time, cost float64, end int64, parts ...[]byte) bool {
	if !s.budget.take(now, cost) {
		s.waitForBudget()
		return false
	}
	taken, full := s.stream.Offer(parts...)
	if taken {
		return true
	}
	if full {
		s.budget.spend(-cost)
		s.waitForRoom()
	} else {
		s.paid = end
		f.wake(s)
	}
	return false
}

// returnBytes is about how many bytes a client is offered at once when there is room again: others wait as well.
const returnBytes = 64 << 10

// Return implements wire.Returner: it offers what has come meanwhile.
func (s *subscriber) Return() {
	f := s.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	s.listed = false
	if !s.waits {
		return
	}
	s.waits = false
	if s.cursor < f.entries.Base() {
		f.wake(s)
		return
	}
	parts, cursor, at := f.due(s, math.MaxInt, returnBytes)
	now := time.Now()
	if f.ended || s.stream == nil {
		if s.budget.take(now, costOfParts(parts)) {
			s.paid = cursor
			f.wake(s)
		} else {
			s.waitForBudget()
		}
		return
	}
	if len(parts) > 0 && !f.offer(s, now, costOfParts(parts), cursor, parts...) {
		return
	}
	s.stream.Flush()
	s.cursor, s.at = cursor, at
	delivered.Add(float64(len(parts)))
	switch {
	case s.cursor < f.entries.Next():
		s.waitForRoom()
	case f.owes(s, now):
		s.late = false
		f.wake(s)
	default:
		s.direct, s.late = true, false
	}
}

// sendBookmarks gives the newest bookmark to those who are due one.
func (f *feed) sendBookmarks(now time.Time) {
	for _, s := range f.subs {
		switch {
		case s.waits || !f.owes(s, now):
		case !s.direct:
			f.wake(s)
		case f.offer(s, now, 0, s.cursor, f.bookmark.data):
			f.marked(s, now.Add(s.period))
		}
	}
	f.flush()
}

// flush writes what was offered: one write for each connection.
func (f *feed) flush() {
	for _, s := range f.subs {
		if s.direct {
			s.stream.Flush()
		}
	}
}

// wake makes the client's own goroutine go on.
func (f *feed) wake(s *subscriber) {
	s.direct, s.waits = false, false
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// keptRecent is what a feed keeps of events that every client of it has seen, for those who come to join it; it may
// keep twice as much until it looks again who has seen what.
const keptRecent = 64 << 10

// hold accounts for bytes that the feed begins or, below 0, ceases to keep.
func (f *feed) hold(n int) {
	f.hub.room().hold(f.bytes, n)
	f.bytes += n
}

// trim drops the oldest entries: those that every client has seen, beyond keptRecent bytes, and any beyond FeedBytes
// or, where all feeds together keep more than FeedsBytes, beyond the feed's share. A client that still needs one goes
// on with a stream of its own.
func (f *feed) trim() {
	most, recent := f.hub.room().share(f.hub.Config.FeedsBytes)
	most = min(most, f.hub.Config.FeedBytes)
	over := func() bool { return f.bytes > most }
	if f.bytes <= 2*recent && !over() {
		return
	}
	slowest := f.entries.Next()
	for _, s := range f.subs {
		slowest = min(slowest, s.cursor)
	}
	sequence := f.entries.Base()
	f.entries.DropWhile(func(e entry) bool {
		seen := sequence < slowest
		if !over() && (!seen || f.bytes <= recent) {
			return false
		}
		f.hold(-len(e.data) - entryBytes)
		f.low = e.at
		sequence++
		return true
	})
}

// end lets every client go on alone.
func (f *feed) end() {
	f.mu.Lock()
	f.ended = true
	f.hold(-f.bytes)
	f.hub.room().leave(f)
	for _, s := range f.subs {
		f.wake(s)
	}
	f.forget()
	f.mu.Unlock()
	f.hub.drop(f)
}

// run follows the watch tier until the feed is closed or the stream ends in a way that every client must see for
// itself.
func (f *feed) run(ctx context.Context) {
	defer f.end()
	r := &watchfanoutv1.WatchRequest{
		Query:             f.query,
		AllowBookmarks:    true,
		SendInitialEvents: new(bool),
		ColumnsSent:       true,
		InitialEventsDone: true,
		Owner:             f.owner,
	}
	var lost time.Time
	for {
		err := f.follow(ctx, r, func() { lost = time.Time{} })
		if ctx.Err() != nil || status.Code(err) != codes.Unavailable || !f.served() {
			return
		}
		if lost.IsZero() {
			lost = time.Now()
			resumed.Inc()
		} else if time.Since(lost) > heldOpen {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(pauseAfter(lost)):
		}
	}
}

// follow receives from one replica after the other, each of which takes over from the one before while that still
// sends, until one breaks off.
func (f *feed) follow(ctx context.Context, r *watchfanoutv1.WatchRequest, alive func()) error {
	s, err := f.open(ctx, r)
	for err == nil {
		err = f.receive(s, alive)
		s.cancel()
		if next := s.successor(); next != nil {
			s, err = next, nil
		}
	}
	return err
}

// receive broadcasts what a replica sends, until it breaks off.
func (f *feed) receive(s *replicaStream, alive func()) (err error) {
	m := s.first
	for {
		if m == nil {
			if m, err = s.Recv(); err != nil {
				return err
			}
		}
		if m.End {
			return io.EOF
		}
		alive()
		f.broadcast(m)
		m = nil
	}
}
