// Package coalesce shares readings of what changes: a caller gets the answer of a reading that began after it asked, so
// the answer is as fresh as one of its own. All who ask for the same while one reading is under way share the next.
package coalesce

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/recovery"
)

// Group shares readings by name. Its zero value bounds how many by nothing; set its fields before the first use.
type Group[T any] struct {
	// Limit is how many readings, of all names, are under way at a time; 0: any number. Those beyond it wait, and whose
	// turn is next goes round among the owners.
	Limit int
	// Queue is how many readings of one owner may wait for a turn; 0: any number. Beyond it Get fails with ErrBusy.
	// Those that wait behind one of the same name do not count.
	Queue int
	// Timeout bounds one reading, which is nobody's own: whoever asked may have left. 0: a minute.
	Timeout time.Duration
	// Finish: a reading that has begun goes on, within Timeout, after all its callers have left. It is for answers that
	// read keeps: callers that leave and return do not make it begin again.
	Finish bool

	mu      sync.Mutex
	names   map[string]*readings[T]
	running int
	// waiting are the readings of each owner that wait for their turn, and turns the owners that have any, the next one
	// first.
	waiting    map[string][]*reading[T]
	ownerQueue []string
}

// readings are those of one name.
type readings[T any] struct {
	// inFlight began already: nobody may join it. next is for those who ask now.
	inFlight, next *reading[T]
}

type reading[T any] struct {
	name string
	// owners are those whose turn it waits for, whichever comes first.
	owners []string
	read   func(context.Context) (T, error)
	done   chan struct{}
	value  T
	err    error
	// callers are those who still want the answer.
	callers int
	// cancel ends the reading, once it has begun.
	cancel context.CancelFunc
}

// ErrBusy says that an owner has too many readings waiting.
var ErrBusy = errors.New("too many readings of this owner are waiting")

// Get is what read answers, or what that of another caller does who asks for the same name. The answer is shared: it
// must not be changed. A reading that nobody waits for any more is not made, or is cancelled.
func (g *Group[T]) Get(ctx context.Context, name string, read func(context.Context) (T, error)) (T, error) {
	return g.GetFor(ctx, "", name, read)
}

// GetFor is Get on behalf of an owner, out of whose share of the turns the reading comes if it is the first to ask.
func (g *Group[T]) GetFor(ctx context.Context, owner, name string, read func(context.Context) (T, error)) (T, error) {
	r, err := g.join(owner, name, read)
	if err == nil {
		select {
		case <-r.done:
			return r.value, r.err
		case <-ctx.Done():
			g.leave(r)
			err = ctx.Err()
		}
	}
	var none T
	return none, err
}

func (g *Group[T]) join(owner, name string, read func(context.Context) (T, error)) (*reading[T], error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.names == nil {
		g.names, g.waiting = map[string]*readings[T]{}, map[string][]*reading[T]{}
	}
	all := g.names[name]
	if all != nil && all.next != nil {
		r := all.next
		r.callers++
		switch { // it is not to wait behind another's
		case slices.Contains(r.owners, owner) || g.Queue > 0 && len(g.waiting[owner]) >= g.Queue:
		case all.inFlight == nil:
			g.enqueue(r, owner)
		default:
			r.owners = append(r.owners, owner)
		}
		return r, nil
	}
	if g.Queue > 0 && len(g.waiting[owner]) >= g.Queue {
		return nil, ErrBusy
	}
	if all == nil {
		all = &readings[T]{}
		g.names[name] = all
	}
	r := &reading[T]{
		name:    name,
		read:    read,
		done:    make(chan struct{}),
		callers: 1,
	}
	all.next = r
	if all.inFlight == nil {
		g.enqueue(r, owner)
	} else {
		r.owners = []string{owner}
	}
	return r, nil
}

// leave gives up a reading; the last to do so ends it, unless it has begun and Finish is set.
func (g *Group[T]) leave(r *reading[T]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.callers--; r.callers > 0 {
		return
	}
	if r.cancel != nil { // it has begun
		if !g.Finish {
			r.cancel()
		}
		return
	}
	all := g.names[r.name]
	all.next = nil
	if all.inFlight == nil {
		delete(g.names, r.name)
		g.dequeue(r)
	}
}

// enqueue has a reading wait for an owner's turn, which may come at once. The lock is held, as in all that follow.
func (g *Group[T]) enqueue(r *reading[T], owner string) {
	r.owners = append(r.owners, owner)
	if len(g.waiting[owner]) == 0 {
		g.ownerQueue = append(g.ownerQueue, owner)
	}
	g.waiting[owner] = append(g.waiting[owner], r)
	g.dispatch()
}

// dequeue takes a reading out of all queues that it is in.
func (g *Group[T]) dequeue(r *reading[T]) {
	for _, owner := range r.owners {
		i := slices.Index(g.waiting[owner], r)
		if i < 0 {
			continue
		}
		g.waiting[owner] = slices.Delete(g.waiting[owner], i, i+1)
		if len(g.waiting[owner]) == 0 {
			delete(g.waiting, owner)
			g.ownerQueue = slices.DeleteFunc(g.ownerQueue, func(o string) bool { return o == owner })
		}
	}
}

// dispatch begins readings for as long as there is room: one of each owner in turn.
func (g *Group[T]) dispatch() {
	for len(g.ownerQueue) > 0 && (g.Limit == 0 || g.running < g.Limit) {
		owner := g.ownerQueue[0]
		g.ownerQueue = append(g.ownerQueue[1:], owner)
		r := g.waiting[owner][0]
		g.dequeue(r)
		g.begin(r)
	}
}

func (g *Group[T]) begin(r *reading[T]) {
	timeout := g.Timeout
	if timeout <= 0 {
		timeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	all := g.names[r.name]
	all.inFlight, all.next = r, nil
	r.cancel = cancel
	g.running++
	go func() {
		defer cancel()
		r.value, r.err = runRead(ctx, r.read)
		close(r.done)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.running--
		if all.inFlight = nil; all.next != nil {
			next := all.next
			owners := next.owners
			next.owners = nil
			for i, owner := range owners {
				full := i > 0 && g.Queue > 0 && len(g.waiting[owner]) >= g.Queue
				if all.next == next && !full { // else it has begun
					g.enqueue(next, owner)
				}
			}
			return
		}
		delete(g.names, r.name)
		g.dispatch()
	}()
}

func runRead[T any](ctx context.Context, read func(context.Context) (T, error)) (value T, err error) {
	defer recovery.ToError("a shared reading", &err)
	value, err = read(ctx)
	if err == nil && ctx.Err() != nil {
		err = errors.New("the reading took too long")
	}
	return value, err
}
