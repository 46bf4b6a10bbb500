package core

import (
	"cmp"
	"errors"
	"math"
	"time"

	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Broadcast is a stream of events that equal watches share: its recent events and its position. The caller's lock
// guards it and its receivers.
type Broadcast struct {
	// Bytes is the size of the recent events.
	Bytes int
	// High is the position that the stream has reached. A stream from another replica resumes after it.
	High events.Position
	// Ended: each receiver sends its pending entries, and then opens its own stream.
	Ended bool
	// Bookmark is the newest bookmark. Every event before it is or was in entries.
	Bookmark Entry

	entries events.Ring[Entry] // holds every event after low
	low     events.Position
	aging   events.Aging
	// bookmarks counts the bookmarks received.
	bookmarks int64
	parts     [][]byte // of the last delivery; reused
}

// Entry is an event of a stream.
type Entry struct {
	Data     []byte
	Position events.Position
}

// EntryBytes is the size of an entry without its data.
const EntryBytes = 48

// NewBroadcast returns a broadcast of the events after a position.
func NewBroadcast(after events.Position) Broadcast { return Broadcast{low: after, High: after} }

// Joinable returns whether the broadcast holds the events after a position, or will.
func (b *Broadcast) Joinable(after events.Position) bool {
	return !b.Ended && !after.Before(b.low) && !after.DifferentEpoch(b.High)
}

// Join makes r a receiver of the events after a position. It returns false if the broadcast is not joinable there.
func (b *Broadcast) Join(r *Receiver, after events.Position) bool {
	if !b.Joinable(after) {
		return false
	}
	r.Cursor = b.entries.Search(func(e Entry) bool { return after.Before(e.Position) })
	r.position, r.skipUntil = after, after
	return true
}

// Leave ends the part of a receiver, and returns its position.
func (b *Broadcast) Leave(r *Receiver) events.Position {
	r.State, r.Direct = Active, false
	b.advance(r)
	return r.position
}

// advance sets the position of a receiver without pending entries to the broadcast's.
func (b *Broadcast) advance(r *Receiver) {
	if r.Cursor == b.entries.Next() && r.position.Before(b.High) {
		r.position = b.High
	}
}

// Backlog returns the number of entries after a receiver's cursor, and estimates their bytes from the average size.
func (b *Broadcast) Backlog(r *Receiver) (entries, bytes int64) {
	base, next := b.entries.Base(), b.entries.Next()
	if entries = next - max(r.Cursor, base); entries <= 0 {
		return 0, 0
	}
	return entries, (int64(b.Bytes) - EntryBytes*(next-base)) * entries / (next - base)
}

// Delivery is the new entries of a frame, for the synced receivers. Parts is valid until the next call of Add.
type Delivery struct {
	Parts       [][]byte
	End         int64 // the cursor after the entries
	Traces      []string
	Bookmark    bool // the frame had a bookmark
	first, last events.Position
}

// Add adds a frame's events to the ring. It drops an event that the broadcast has: the stream replaced another, which
// had sent the event.
func (b *Broadcast) Add(m *watchfanoutv1.WatchFrame) Delivery {
	var d Delivery
	firstNew := b.entries.Next()
	offset := int32(0)
	for _, boundary := range m.Boundaries {
		e := Entry{m.Data[offset:boundary.End], events.FromProto(boundary.Position)}
		offset = boundary.End
		if e.Position.Before(b.High) || !boundary.Bookmark && !b.High.Before(e.Position) {
			continue
		}
		if boundary.Bookmark {
			b.Bookmark, d.Bookmark = e, true
			b.bookmarks++
			continue
		}
		b.entries.Add(e)
		b.Bytes += len(e.Data) + EntryBytes
		if boundary.Traceparent != "" {
			d.Traces = append(d.Traces, boundary.Traceparent)
		}
	}
	if p := events.FromProto(m.Position); !p.Before(b.High) {
		p.Epoch = cmp.Or(p.Epoch, b.High.Epoch)
		b.High = p
	}
	if added := b.entries.From(firstNew); len(added) > 0 {
		b.parts = b.parts[:0]
		for _, e := range added {
			b.parts = append(b.parts, e.Data)
		}
		d.Parts = b.parts
		d.first, d.last, d.End = added[0].Position, added[len(added)-1].Position, b.entries.Next()
	}
	return d
}

// seenAge is how long a broadcast holds an entry that all receivers have seen, at least, for watches that join later.
// Otherwise each of many broadcasts without traffic would hold its last entries for ever.
const seenAge = 30 * time.Second

// TrimDue returns whether Trim is due: the ring exceeds limit bytes, or retained bytes by far, or has entries of a
// period of seenAge. An ended broadcast keeps its entries until its receivers have left.
func (b *Broadcast) TrimDue(limit, retained int, now time.Time) bool {
	return !b.Ended && (b.Bytes > limit || b.Bytes > 2*retained || b.entries.Len() > 0 && b.aging.Due(now, seenAge))
}

// Trim drops the oldest entries until the ring is within limit bytes. Entries that all receivers have seen, which are
// the entries before slowest, are limited to retained bytes, and dropped if they are old.
func (b *Broadcast) Trim(limit, retained int, slowest int64, now time.Time) {
	old := b.aging.Old(now, seenAge, b.entries.Next())
	sequence := b.entries.Base()
	b.entries.DropWhile(func(e Entry) bool {
		seen := sequence < slowest
		if b.Bytes <= limit && (!seen || b.Bytes <= retained && sequence >= old) {
			return false
		}
		b.Bytes -= len(e.Data) + EntryBytes
		b.low = e.Position
		sequence++
		return true
	})
}

// Release frees the entries, after the last receiver of an ended broadcast has left.
func (b *Broadcast) Release() { b.entries, b.Bytes = events.Ring[Entry]{}, 0 }

var (
	// ErrUnsynced: the broadcast does not hold the receiver's next event. The watch opens its own stream until it has
	// caught up.
	ErrUnsynced = errors.New("unsynced")
	// ErrThrottled is ErrUnsynced for a throttled receiver. Its watch ends, because a stream of its own would cost more
	// than the events it waited for.
	ErrThrottled = errors.New("throttled: over --max-watch-rate-per-user")
	// ErrEnded: the broadcast has ended. Each watch opens its own stream, which returns the reason to its client.
	ErrEnded = errors.New("the watch broadcast has ended")
)

// Batch is the pending entries of a receiver.
type Batch struct {
	Parts [][]byte
	// Charged: the limiter is charged already.
	Charged bool
	// End is the cursor after the entries.
	End      int64
	position events.Position
}

// Pending returns the pending entries of a receiver, for its client's goroutine to write. Call Take after the limiter
// is charged. The receiver stays active unless nothing is pending.
func (b *Broadcast) Pending(r *Receiver) (Batch, error) {
	r.State = Active
	if r.Cursor < b.entries.Base() {
		if r.throttled {
			return Batch{}, ErrThrottled
		}
		return Batch{}, ErrUnsynced
	}
	limit := math.MaxInt
	if r.charged > r.Cursor {
		limit = int(r.charged - r.Cursor)
	}
	pending := b.pending(r, limit, math.MaxInt)
	pending.Charged = r.charged > r.Cursor
	return pending, nil
}

// Take moves a receiver past its pending entries. It returns the parts to write: the entries, and the newest bookmark
// if it is due. If it returns nothing and the receiver is Direct, the receiver is synced. again is true if more entries
// are pending and this batch has none.
func (b *Broadcast) Take(r *Receiver, pending Batch, now time.Time) (parts [][]byte, again bool, err error) {
	r.Cursor, r.position, parts = pending.End, pending.position, pending.Parts
	if r.Cursor < b.entries.Next() {
		return parts, len(parts) == 0, nil
	}
	r.throttled = false
	if b.bookmarkDue(r, now) {
		parts = append(parts, b.Bookmark.Data)
		b.BookmarkSent(r, now)
	}
	if len(parts) > 0 {
		return parts, false, nil
	}
	b.advance(r)
	if b.Ended {
		return nil, false, ErrEnded
	}
	if r.Direct {
		r.State = Synced
	}
	return nil, false, nil
}

// pending returns at most `entries` entries of a receiver, and stops after about `bytes` bytes.
func (b *Broadcast) pending(r *Receiver, entries, bytes int) Batch {
	p := Batch{End: r.Cursor, position: r.position}
	for i, e := range b.entries.From(r.Cursor) {
		if i >= entries || bytes <= 0 {
			break
		}
		p.End++
		// the client has the other entries: it may have joined at a position past high
		if r.skipUntil.Before(e.Position) {
			p.Parts, p.position = append(p.Parts, e.Data), e.Position
			bytes -= len(e.Data)
		}
	}
	return p
}

// Offer returns the action for a receiver when new entries arrive: Skip, Wake or Write. After a write call Delivered.
func (b *Broadcast) Offer(r *Receiver, d *Delivery) Action {
	switch {
	case r.State == Blocked: // Unblock sends them
		return Skip
	case r.State == Synced && r.Cursor == d.End-int64(len(d.Parts)) && r.skipUntil.Before(d.first):
		return Write
	}
	r.State = Active
	return Wake
}

// Delivered records that a receiver was sent the entries.
func (b *Broadcast) Delivered(r *Receiver, d *Delivery) { r.Cursor, r.position = d.End, d.last }

// Unblock returns about `bytes` bytes of the pending entries of a blocked receiver, and the action for it: Skip, Wake,
// Charge or Write. After a charge call Charged, after a write Written.
func (b *Broadcast) Unblock(r *Receiver, bytes int) (Batch, Action) {
	r.queued = false
	if r.State != Blocked {
		return Batch{}, Skip
	}
	r.State = Active
	if r.Cursor < b.entries.Base() {
		return Batch{}, Wake
	}
	pending := b.pending(r, math.MaxInt, bytes)
	if b.Ended || !r.Direct {
		return pending, Charge
	}
	return pending, Write
}

// Written records that an unblocked receiver was sent a batch. It returns the next action: Skip, Wake or Enqueue.
func (b *Broadcast) Written(r *Receiver, sent Batch, now time.Time) Action {
	r.Cursor, r.position = sent.End, sent.position
	if r.Cursor < b.entries.Next() {
		return Enqueue
	}
	r.throttled = false
	if b.bookmarkDue(r, now) {
		return Wake
	}
	r.State = Synced
	return Skip
}

// bookmarkDue reports whether a receiver without pending entries is due the newest bookmark.
func (b *Broadcast) bookmarkDue(r *Receiver, now time.Time) bool {
	return r.AllowBookmarks && r.lastBookmark < b.bookmarks && !now.Before(r.NextBookmark) &&
		!b.Bookmark.Position.Before(r.position) && !b.Bookmark.Position.Before(r.skipUntil)
}

// OfferBookmark returns the action for a receiver when a bookmark arrives: Skip, Wake or Write. After a write call
// BookmarkSent.
func (b *Broadcast) OfferBookmark(r *Receiver, now time.Time) Action {
	switch {
	case r.State == Blocked || !b.bookmarkDue(r, now):
		return Skip
	case r.State == Synced:
		return Write
	}
	return Wake
}

// BookmarkSent records that the receiver was sent the newest bookmark.
func (b *Broadcast) BookmarkSent(r *Receiver, now time.Time) {
	r.position, r.skipUntil = b.Bookmark.Position, b.Bookmark.Position
	r.NextBookmark, r.lastBookmark = now.Add(r.BookmarkPeriod), b.bookmarks
}
