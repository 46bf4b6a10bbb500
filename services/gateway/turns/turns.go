// Package turns limits how many long responses and TLS handshakes use processors at a time, because short requests
// would wait for them.
//
// Go runs goroutines in the order in which they became ready, and lets each run for up to 10 ms. Twenty clients that
// list all pods at once therefore delay each step of a write by twenty responses. A long response takes a turn before
// each part of its work. Owners get turns in rotation, and the responses of an owner in order.
//
// A turn ends when the response yields it, when its time is over, or when a write waits for the response's client. A
// slow client therefore delays no other response. After its turn ends, a response continues its current part, and waits
// before the next part.
//
// TLS handshakes take turns of their own (Handshakes). Their owner is the client's address.
//
// The package starts no goroutine. A timer ends a turn whose time is over.
package turns

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/telemetry"
)

const (
	// LongBytes is the size in bytes above which a response takes turns. A smaller response takes about as much work
	// as a request for a single object.
	LongBytes = 256 << 10
	// Slice is the usual time of a turn: Go lets a goroutine run for as long.
	Slice = 10 * time.Millisecond
)

// Turns schedules the turns of long responses or of handshakes. Nil lets all responses work at once.
type Turns struct {
	limit int
	slice time.Duration
	// maxWait bounds the wait of a handshake.
	maxWait time.Duration

	mu   sync.Mutex
	held int
	// waiting has the waiting turns of each owner, in order. ownerQueue has the owners of waiting turns; the first is
	// next.
	waiting    map[string][]*Turn
	ownerQueue []string
}

// New returns turns of which at most limit are held at a time, each for at most slice.
func New(limit int, slice time.Duration) *Turns {
	return &Turns{limit: limit, slice: slice, maxWait: maxHandshakeWait, waiting: map[string][]*Turn{}}
}

// OfProcessors returns turns of half of the processors, with a minimum of 1.
func OfProcessors() *Turns { return New(max(1, runtime.GOMAXPROCS(0)/2), Slice) }

// Turn lets a response or a handshake use a processor. It is idle, waiting (in Take) or held. A single goroutine calls
// Take. Nil lets the response work at once.
type Turn struct {
	turns *Turns
	owner string
	conn  *conn // nil if the context has no connection

	// Turns.mu guards the fields below. granted closes when the turn no longer waits.
	held    bool
	granted chan struct{}
	expiry  *time.Timer
}

type turnKey struct{}

// NewTurn returns the idle turn of an owner's response, and a context for Yield and Waiting. WithConn adds the client's
// connection to ctx. The caller calls Yield after its last Take.
func (s *Turns) NewTurn(ctx context.Context, owner string) (*Turn, context.Context) {
	if s == nil {
		return nil, ctx
	}
	t := &Turn{turns: s, owner: owner}
	t.conn, _ = ctx.Value(connKey{}).(*conn)
	return t, context.WithValue(ctx, turnKey{}, t)
}

// Yield ends the turn of NewTurn's context, if it is held.
func Yield(ctx context.Context) {
	t, _ := ctx.Value(turnKey{}).(*Turn)
	t.Yield()
}

// Take waits until the turn is held. It returns without a turn if the client's connection is blocked, because the
// response then waits for the client. The error is ctx's.
func (t *Turn) Take(ctx context.Context) error {
	if t == nil {
		return ctx.Err()
	}
	s := t.turns
	s.mu.Lock()
	if t.held {
		s.mu.Unlock()
		return ctx.Err()
	}
	if len(s.waiting[t.owner]) == 0 {
		s.ownerQueue = append(s.ownerQueue, t.owner)
	}
	s.waiting[t.owner] = append(s.waiting[t.owner], t)
	granted := make(chan struct{})
	t.granted = granted
	s.grant()
	s.mu.Unlock()
	defer telemetry.AddSlowStep(ctx, "Waited for a turn of long responses", time.Now())
	select {
	case <-granted:
		return ctx.Err()
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dequeue(t)
	return ctx.Err()
}

// Waiting reports whether the turn of NewTurn's context waits in Take.
func Waiting(ctx context.Context) bool {
	t, _ := ctx.Value(turnKey{}).(*Turn)
	if t == nil {
		return false
	}
	t.turns.mu.Lock()
	defer t.turns.mu.Unlock()
	return slices.Contains(t.turns.waiting[t.owner], t)
}

// Yield ends the turn if it is held.
func (t *Turn) Yield() {
	if t == nil {
		return
	}
	s := t.turns
	s.mu.Lock()
	defer s.mu.Unlock()
	if !t.held {
		return
	}
	t.held = false
	s.held--
	t.expiry.Stop()
	t.conn.remove(t)
	s.grant()
}

// grant ends the wait of the next turns. The callers of grant and dequeue hold the lock.
func (s *Turns) grant() {
	for len(s.ownerQueue) > 0 && s.held < s.limit {
		owner := s.ownerQueue[0]
		t := s.waiting[owner][0]
		s.dequeue(t)
		if len(s.waiting[owner]) > 0 { // the owner's next response waits for the other owners
			s.ownerQueue = append(s.ownerQueue[1:], owner)
		}
		close(t.granted)
		if !t.conn.add(t) {
			continue
		}
		t.held = true
		s.held++
		if t.expiry == nil {
			t.expiry = time.AfterFunc(s.slice, t.Yield)
		} else {
			t.expiry.Reset(s.slice)
		}
	}
}

// Waiting returns the number of turns that wait.
func (s *Turns) Waiting() (n int) {
	if s == nil {
		return 0
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, turns := range s.waiting {
		n += len(turns)
	}
	return n
}

// dequeue removes a waiting turn from its owner's queue.
func (s *Turns) dequeue(t *Turn) {
	i := slices.Index(s.waiting[t.owner], t)
	if i < 0 {
		return
	}
	if i == 0 { // mostly, and thousands of turns may wait
		s.waiting[t.owner][0] = nil
		s.waiting[t.owner] = s.waiting[t.owner][1:]
	} else {
		s.waiting[t.owner] = slices.Delete(s.waiting[t.owner], i, i+1)
	}
	if len(s.waiting[t.owner]) == 0 {
		delete(s.waiting, t.owner)
		i := slices.Index(s.ownerQueue, t.owner)
		s.ownerQueue = slices.Delete(s.ownerQueue, i, i+1)
	}
}
