// Package coalesce shares reads of changing data. A caller gets the result of a read that began after its call, so the
// result is as fresh as a read of its own. Callers that arrive while a read is in flight share the next read. The
// package does not cache results.
//
// A Group owns a goroutine per read in flight. The group's lock guards the queues.
package coalesce

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/recovery"
)

// Group shares reads by name. Its zero value has no bounds. Set its fields before the first use.
type Group[T any] struct {
	// Limit bounds the reads in flight, of all names; 0: no bound. Further reads wait, and their owners take turns.
	Limit int
	// PerOwner bounds the reads in flight that turns of the same owner have started; 0: no bound. Slow reads of an
	// owner then leave the rest of Limit to others.
	PerOwner int
	// Queue bounds the waiting reads of an owner; 0: no bound. Beyond it Get returns ErrBusy. A read that waits for a
	// read of the same name does not count.
	Queue int
	// Timeout bounds a read; 0: a minute. No caller's context bounds it, because that caller may leave and others may
	// stay.
	Timeout time.Duration
	// Finish lets a read in flight continue, within Timeout, after all its callers have left. Set it if read caches
	// its result: callers that leave and return then do not start the read again.
	Finish bool

	mu      sync.Mutex
	names   map[string]*readings[T]
	running int
	// runningOf counts the reads in flight by the owner whose turn has started them.
	runningOf map[string]int
	// waiting has the waiting reads of each owner. ownerQueue has the owners of waiting reads, in the order of their
	// turns.
	waiting    map[string][]*reading[T]
	ownerQueue []string
}

// readings are the reads of a name.
type readings[T any] struct {
	// inFlight has started, so no caller may join it. New callers join next.
	inFlight, next *reading[T]
}

// reading is a shared read.
//
//	next --no read of its name in flight--> queued --turn--> in flight --read returns--> done
//
// A read in the states next and queued is removed when its last caller leaves. In flight it is then canceled, unless
// Finish is set.
type reading[T any] struct {
	name string
	// owners are the owners whose turns the read waits for. The first turn starts it.
	owners []string
	read   func(context.Context) (T, error)
	done   chan struct{}
	value  T
	err    error
	// callers is the number of callers that wait for the result.
	callers int
	// cancel ends the read; nil before it starts.
	cancel context.CancelFunc
}

// ErrBusy is the error of Get when an owner has too many waiting reads.
var ErrBusy = errors.New("this owner has too many waiting reads")

// Get returns the result of read, or the result of another caller's read of the same name. Callers share the result
// and must not change it. If all callers leave, the read is not started, or is canceled (see Finish).
func (g *Group[T]) Get(ctx context.Context, name string, read func(context.Context) (T, error)) (T, error) {
	return g.GetFor(ctx, "", name, read)
}

// GetFor is Get on behalf of an owner. A read waits for the turns of all owners that request it, and takes the first.
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
		g.runningOf = map[string]int{}
	}
	all := g.names[name]
	if all != nil && all.next != nil {
		r := all.next
		r.callers++
		switch { // the read does not wait only for another owner's turn
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

// leave removes a caller from a read. The last caller ends the read, unless it is in flight and Finish is set.
func (g *Group[T]) leave(r *reading[T]) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.callers--; r.callers > 0 {
		return
	}
	if r.cancel != nil { // in flight
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

// enqueue adds a read to an owner's queue, and may start it at once. The callers of enqueue, dequeue, dispatch and
// begin hold the lock.
func (g *Group[T]) enqueue(r *reading[T], owner string) {
	r.owners = append(r.owners, owner)
	if len(g.waiting[owner]) == 0 {
		g.ownerQueue = append(g.ownerQueue, owner)
	}
	g.waiting[owner] = append(g.waiting[owner], r)
	g.dispatch()
}

// dequeue removes a read from all its queues.
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

// dispatch starts reads while Limit allows: a read of each owner in turn.
func (g *Group[T]) dispatch() {
	mayBegin := func(owner string) bool { return g.PerOwner == 0 || g.runningOf[owner] < g.PerOwner }
	for g.Limit == 0 || g.running < g.Limit {
		i := slices.IndexFunc(g.ownerQueue, mayBegin)
		if i < 0 {
			return
		}
		owner := g.ownerQueue[i]
		g.ownerQueue = append(slices.Delete(g.ownerQueue, i, i+1), owner)
		r := g.waiting[owner][0]
		g.dequeue(r)
		g.begin(r, owner)
	}
}

func (g *Group[T]) begin(r *reading[T], owner string) {
	timeout := g.Timeout
	if timeout <= 0 {
		timeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	all := g.names[r.name]
	all.inFlight, all.next = r, nil
	r.cancel = cancel
	g.running++
	g.runningOf[owner]++
	go func() {
		defer cancel()
		r.value, r.err = runRead(ctx, r.read)
		close(r.done)
		g.mu.Lock()
		defer g.mu.Unlock()
		g.running--
		if g.runningOf[owner]--; g.runningOf[owner] == 0 {
			delete(g.runningOf, owner)
		}
		if all.inFlight = nil; all.next != nil {
			next := all.next
			owners := next.owners
			next.owners = nil
			for i, owner := range owners {
				full := i > 0 && g.Queue > 0 && len(g.waiting[owner]) >= g.Queue
				if all.next == next && !full { // otherwise it has started
					g.enqueue(next, owner)
				}
			}
		} else {
			delete(g.names, r.name)
		}
		g.dispatch()
	}()
}

func runRead[T any](ctx context.Context, read func(context.Context) (T, error)) (value T, err error) {
	defer recovery.ToError("a shared read", &err)
	value, err = read(ctx)
	if err == nil && ctx.Err() != nil {
		err = errors.New("the read timed out")
	}
	return value, err
}
