package core

import (
	"time"

	"watershed.dev/platform/events"
)

// State is a receiver's state.
type State int

// The states of a receiver.
const (
	// Active: the client's own goroutine writes the pending entries. If there are none, it waits for Wake.
	Active State = iota
	// Synced: the client has received every entry. The broadcast's goroutine writes the next event to it.
	Synced
	// Blocked: the owner's limiter has no tokens, or the connection's queue is full. The broadcast skips the receiver,
	// and the limiter or the connection unblocks it later.
	Blocked
)

// Action is an action that a shell takes for a receiver.
type Action int

// The actions for a receiver.
const (
	// Skip: nothing.
	Skip Action = iota
	// Wake: make the client's goroutine take the pending entries.
	Wake
	// Write: write the entries to the client, without waiting.
	Write
	// Charge: charge the limiter for the entries, and wake the client's goroutine if it has tokens.
	Charge
	// Enqueue: unblock the receiver when the connection's queue has space.
	Enqueue
)

// Receiver is a client's part in a broadcast. Its states:
//
//	                +---------- wake ----------+
//	                v                          |
//	join ------> active --- all sent ----> synced
//	             |  ^ |                      ^ |
//	             |  | +-- no tokens --+      | |
//	             |  |                 v      | |
//	             |  +---- wake ---- blocked -+ |
//	             v                       ^-----+
//	          unsynced
//
// A receiver that is not Direct (HTTP/1.1) is never synced. It is unsynced if the ring has dropped an entry that it
// needs: it leaves the broadcast and opens its own stream.
//
//   - active to synced: Pending and Take find no entry and no due bookmark.
//   - active to blocked: the limiter has no tokens (throttled is set).
//   - active to unsynced: Pending finds the cursor below the ring's base, or the broadcast ended and all its entries
//     sent. In the first case, a throttled receiver's watch ends instead.
//   - synced to blocked: a write finds no tokens (throttled is set) or a full queue.
//   - synced to active: the stream's window is full, other entries are pending, or the broadcast ends.
//   - blocked to synced: all entries are written. throttled is reset.
//   - blocked to blocked: a batch is written and more entries follow, or there are no tokens or no space again.
//   - blocked to active: the entries are dropped, the broadcast ended, the receiver is not Direct, its window is full,
//     or a bookmark is due.
//   - any to active: Pending or BookmarkNow.
type Receiver struct {
	// Direct is true if the broadcast's goroutine may write to the client.
	Direct bool
	// AllowBookmarks is true if the client allows bookmarks, and BookmarkPeriod the minimum time between two.
	AllowBookmarks bool
	BookmarkPeriod time.Duration
	// NextBookmark is when the next bookmark is due. Zero: now.
	NextBookmark time.Time
	State        State
	// Cursor is the sequence of the next entry.
	Cursor   int64
	position events.Position
	// queued: the limiter or the connection will unblock the receiver.
	queued bool
	// throttled: the receiver has waited for the limiter since it was last synced.
	throttled bool
	// charged: the limiter is already charged for entries before this sequence, which the client's goroutine writes.
	charged int64
	// lastBookmark is the number of the last bookmark sent.
	lastBookmark int64
	// skipUntil: the client already has events up to this position.
	skipUntil events.Position
}

// Block blocks the receiver, for the limiter (throttled) or for the connection's queue. It returns true if the caller
// must enqueue it there.
func (r *Receiver) Block(throttled bool) (enqueue bool) {
	enqueue = !r.queued
	r.State, r.queued, r.throttled = Blocked, true, r.throttled || throttled
	return enqueue
}

// Charged makes the receiver active after the limiter was charged for its entries before end, because its client's
// goroutine must write them: its stream's window is full.
func (r *Receiver) Charged(end int64) { r.charged, r.State = end, Active }

// BookmarkNow makes a bookmark due now.
func (r *Receiver) BookmarkNow() { r.NextBookmark, r.State = time.Time{}, Active }
