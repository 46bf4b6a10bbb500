package core

import (
	"errors"
	"math"
	"slices"
	"strconv"
	"time"

	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// gateway is a gateway with a broadcast for each resource, and its clients.
type gateway struct {
	broadcasts [resourceCount]*broadcast
	clients    []*client
	// bookmarks are the positions of all bookmarks. Their frames hold an index.
	bookmarks []events.Position
	// epochs are the generation of etcd in which each epoch began.
	epochs map[string]int
	// limit and retained bound the bytes of a broadcast. 0: no bound.
	limit, retained int
	// choose returns a replica for a stream.
	choose func() *replica
}

// broadcast is a broadcast with its streams.
type broadcast struct {
	Broadcast
	resource int
	// stream is the current stream, and next the stream that replaces it.
	stream, next *tierStream
	receivers    []*client
}

// writeResult is the result of a write that does not wait for the client.
type writeResult int

const (
	accepted writeResult = iota
	noTokens
	queueFull
	windowFull
)

// client is a client's watch.
type client struct {
	name     string
	resource int
	request  *watchfanoutv1.WatchRequest
	place    Watch
	// own is the watch's own stream, and in the broadcast that it has joined. Neither: it has no stream.
	own      *tierStream
	in       *broadcast
	receiver Receiver
	direct   bool
	// waits: the limiter or the connection will unblock the receiver. charge is for the limiter.
	waits bool
	// result returns the result of the next write. Nil: accepted.
	result func() writeResult
	// last is the last event that the client has, and generation of etcd that its list was read from.
	last, generation int
	admitted         bool
	// rejoinAfter is when the watch may join a broadcast again after its last broadcast ended.
	rejoinAfter time.Time
	// end is the reason why the watch ended.
	end string
	// received is the events that the client received since the last line of a transcript.
	received []string
}

// open opens a watch of a client that has listed at a revision.
func (w *world) open(name string, resource int, revision int64) *client {
	r := &watchfanoutv1.WatchRequest{ResourceVersion: strconv.FormatInt(revision, 10), AllowBookmarks: true}
	c := &client{name: name, resource: resource, request: r, direct: true, generation: w.etcd.generation}
	c.place = NewWatch(r, w.now.Add(time.Second))
	c.last = w.etcd.timelines[w.etcd.generation].last(resource, revision)
	w.gateway.clients = append(w.gateway.clients, c)
	return c
}

func (c *client) ended() bool { return c.end != "" }

// close ends the watch for a reason. The client lists again.
func (c *client) close(w *world, reason string) {
	c.leave(w)
	c.own, c.end = nil, reason
	if w.trace != nil {
		w.tracef("%s: the watch ends: %s", c.name, reason)
	}
}

// admit returns whether the client's list is of the generation of etcd of the first epoch that it receives. Otherwise
// it closes the watch: a resourceVersion does not name its epoch, so no server can find out.
func (c *client) admit(w *world, epoch string) bool {
	if generation, known := w.gateway.epochs[epoch]; c.admitted || !known {
		return true
	} else if generation != c.generation {
		c.close(w, "its list is of another epoch")
		return false
	}
	c.admitted = true
	return true
}

// receive checks an event or a bookmark that the client receives.
func (c *client) receive(w *world, part []byte) {
	id := idOf(part)
	if w.trace != nil {
		c.received = append(c.received, w.describePart(part))
	}
	if !isBookmark(part) {
		if previous := w.etcd.previous[id]; previous != c.last {
			w.violated("%s receives event %d after event %d, not after event %d", c.name, id, c.last, previous)
		}
		c.last = id
		return
	}
	p := w.gateway.bookmarks[id]
	generation, known := w.gateway.epochs[p.Epoch]
	if last := w.etcd.timelines[generation].last(c.resource, p.Revision); known && last != c.last {
		w.violated("%s receives a bookmark of revision %d after event %d, and lacks event %d", c.name, p.Revision, c.last,
			last)
	}
}

func (c *client) receiveAll(w *world, parts [][]byte) {
	if c.in != nil && !c.admit(w, c.in.High.Epoch) {
		return
	}
	for _, p := range parts {
		c.receive(w, p)
	}
	c.report(w)
}

// report traces the events that the client received.
func (c *client) report(w *world) {
	if w.trace != nil && len(c.received) > 0 {
		for _, s := range c.received {
			w.tracef("%s: receives %s", c.name, s)
		}
		c.received = c.received[:0]
	}
}

// step continues the client's goroutine: a frame of its own stream, its part in a broadcast, or the next stream.
func (c *client) step(w *world) {
	switch {
	case c.ended():
	case c.in != nil:
		c.take(w)
	case c.own != nil && c.own.broken():
		c.own = nil
		if w.trace != nil {
			w.tracef("%s: its stream breaks", c.name)
		}
	case c.own != nil:
		c.forward(w)
	case !c.join(w):
		c.openStream(w)
	}
}

func (c *client) openStream(w *world) {
	c.own = w.gateway.choose().watch(w, c.resource, c.place.Position())
}

// forward forwards a frame of the watch's own stream. The watch may then join a broadcast.
func (c *client) forward(w *world) {
	s := c.own
	if len(s.frames) == 0 {
		return
	}
	m := s.frames[0]
	s.frames = s.frames[1:]
	if !c.admit(w, m.Position.GetEpoch()) {
		return
	}
	if data := c.place.WithoutEarlyBookmarks(m, w.now, w.now.Add(time.Hour), time.Minute); len(data) > 0 {
		for ; len(data) > 0; data = data[4:] {
			c.receive(w, data[:4])
		}
		c.report(w)
	}
	if m.End {
		c.close(w, "410 Expired")
		return
	}
	c.place.Sent(m)
	if b := w.gateway.broadcasts[c.resource]; c.mayJoin(w) && (b == nil || b.Joinable(c.place.Position())) {
		c.own = nil
		if w.trace != nil {
			w.tracef("%s: has caught up", c.name)
		}
	}
}

func (c *client) mayJoin(w *world) bool { return c.place.MayJoin() && w.now.After(c.rejoinAfter) }

// join joins the broadcast of the resource, or begins it.
func (c *client) join(w *world) bool {
	b, p := w.gateway.broadcasts[c.resource], c.place.Position()
	if !c.mayJoin(w) || b == nil && !c.place.Reached {
		return false
	}
	if b != nil && !c.place.Reached && b.High.Revision < p.Revision && p.Revision > w.etcd.revision() {
		return false
	}
	if b == nil {
		b = &broadcast{Broadcast: NewBroadcast(p), resource: c.resource}
		w.gateway.broadcasts[c.resource] = b
		if w.trace != nil {
			w.tracef("gateway: a broadcast begins at position %s", describePosition(p))
		}
		b.stream = w.gateway.choose().watch(w, c.resource, p)
	}
	c.receiver = Receiver{}
	if !b.Join(&c.receiver, p) {
		return false
	}
	c.receiver.Direct, c.receiver.AllowBookmarks, c.receiver.BookmarkPeriod = c.direct, true, time.Minute
	c.receiver.NextBookmark = c.place.NextBookmark
	c.in, c.waits = b, false
	b.receivers = append(b.receivers, c)
	if w.trace != nil {
		w.tracef("%s: joins the broadcast at position %s", c.name, describePosition(p))
	}
	return true
}

// leave leaves the broadcast.
func (c *client) leave(w *world) {
	if c.in == nil {
		return
	}
	i := slices.Index(c.in.receivers, c)
	c.in.receivers = slices.Delete(c.in.receivers, i, i+1)
	c.place.Left(c.in.Leave(&c.receiver), c.receiver.NextBookmark)
	if w.trace != nil {
		w.tracef("%s: leaves the broadcast at position %s", c.name, describePosition(c.place.Position()))
	}
	c.in, c.waits = nil, false
}

// write is the result of a write.
func (c *client) write() writeResult {
	if c.result == nil {
		return accepted
	}
	return c.result()
}

// take takes the pending entries in the client's goroutine, which waits for the client's window.
func (c *client) take(w *world) {
	b := c.in
	for {
		pending, err := b.Pending(&c.receiver)
		if err == nil && !pending.Charged && len(pending.Parts) > 0 && c.write() == noTokens {
			c.block(w, true)
			return
		}
		var parts [][]byte
		again := false
		if err == nil {
			parts, again, err = b.Take(&c.receiver, pending, w.now)
		}
		switch {
		case errors.Is(err, ErrThrottled):
			c.close(w, err.Error())
		case err != nil:
			if w.trace != nil {
				w.tracef("%s: %v", c.name, err)
			}
			if errors.Is(err, ErrEnded) {
				c.rejoinAfter = w.now.Add(10 * time.Second)
			}
			c.leave(w)
			c.openStream(w)
		case again:
			continue
		default:
			c.receiveAll(w, parts)
		}
		return
	}
}

func (c *client) block(w *world, throttled bool) {
	if c.receiver.Block(throttled) {
		c.waits = true
	}
	if w.trace != nil {
		w.tracef("%s: is blocked: %s", c.name, map[bool]string{true: "no tokens", false: "the queue is full"}[throttled])
	}
}

// tryWrite writes parts from the broadcast's goroutine, without waiting.
func (c *client) tryWrite(w *world, end int64, parts ...[]byte) bool {
	switch c.write() {
	case noTokens:
		c.block(w, true)
	case queueFull:
		c.block(w, false)
	case windowFull:
		c.receiver.Charged(end)
		if w.trace != nil {
			w.tracef("%s: its window is full", c.name)
		}
	case accepted:
		c.receiveAll(w, parts)
		return true
	}
	return false
}

// unblock is the call of the limiter or the connection that the receiver waits for.
func (c *client) unblock(w *world) {
	if c.in == nil || !c.waits {
		return
	}
	c.waits = false
	pending, action := c.in.Unblock(&c.receiver, 8)
	if w.trace != nil {
		w.tracef("%s: is unblocked: %s", c.name, [...]string{"skip", "wake", "write", "charge", "enqueue"}[action])
	}
	switch action {
	case Charge:
		if c.write() == noTokens {
			c.block(w, true)
		} else {
			c.receiver.Charged(pending.End)
		}
	case Write:
		if len(pending.Parts) > 0 && !c.tryWrite(w, pending.End, pending.Parts...) {
			return
		}
		if c.in.Written(&c.receiver, pending, w.now) == Enqueue {
			c.block(w, false)
		}
	}
}

// frame receives a frame of the broadcast's stream, or opens another stream if it broke.
func (b *broadcast) frame(w *world) {
	s := b.stream
	if s.broken() {
		if w.trace != nil {
			w.tracef("gateway: the stream breaks")
		}
		b.stream = w.gateway.choose().watch(w, b.resource, b.High)
		return
	}
	if len(s.frames) == 0 {
		return
	}
	m := s.frames[0]
	s.frames = s.frames[1:]
	if m.End {
		b.end(w)
		return
	}
	d := b.Add(m)
	if w.trace != nil {
		w.tracef("gateway: receives %s; new events: %d", w.describeFrame(m), len(d.Parts))
	}
	for _, c := range slices.Clone(b.receivers) {
		if len(d.Parts) > 0 && b.Offer(&c.receiver, &d) == Write && c.tryWrite(w, d.End, d.Parts...) {
			b.Delivered(&c.receiver, &d)
		}
	}
	for _, c := range b.receivers {
		if !d.Bookmark || b.OfferBookmark(&c.receiver, w.now) != Write {
			continue
		}
		if c.tryWrite(w, c.receiver.Cursor, b.Bookmark.Data) {
			b.BookmarkSent(&c.receiver, w.now)
		}
	}
	b.trim(w)
}

func (b *broadcast) trim(w *world) {
	g := &w.gateway
	if g.limit == 0 || !b.TrimDue(g.limit, g.retained, w.now) {
		return
	}
	slowest := int64(math.MaxInt64)
	for _, c := range b.receivers {
		slowest = min(slowest, c.receiver.Cursor)
	}
	before := b.Bytes
	b.Trim(g.limit, g.retained, slowest, w.now)
	if w.trace != nil && b.Bytes != before {
		w.tracef("gateway: drops %d bytes of events, of %d", before-b.Bytes, before)
	}
}

// end ends the broadcast. Its receivers send their pending entries, and open their own streams.
func (b *broadcast) end(w *world) {
	b.Ended = true
	if w.gateway.broadcasts[b.resource] == b {
		w.gateway.broadcasts[b.resource] = nil
	}
	for _, c := range b.receivers {
		c.receiver.State = Active
	}
	if w.trace != nil {
		w.tracef("gateway: the broadcast ends")
	}
}

// reassign opens a stream at another replica. It replaces the current stream after its first frame.
func (b *broadcast) reassign(w *world, r *replica) {
	b.next = r.watch(w, b.resource, b.High)
}

// replace replaces the stream if the next stream has a frame.
func (b *broadcast) replace(w *world) {
	n := b.next
	switch {
	case n == nil:
	case n.broken(), n.ended:
		b.next = nil
	case len(n.frames) > 0:
		b.stream, b.next = n, nil
		if w.trace != nil {
			w.tracef("gateway: the stream of %s replaces the stream", n.replica.name)
		}
	}
}
