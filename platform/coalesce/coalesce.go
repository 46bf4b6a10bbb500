// Package coalesce shares readings of what changes: a caller gets the answer of a reading that began after it asked, so the answer is as
// fresh as one of its own. All who ask for the same while one reading is under way share the next.
package coalesce

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// Group shares readings by key. Its zero value bounds how many by nothing; set its fields before the first use.
type Group[T any] struct {
	// Limit is how many readings, of all keys, are under way at a time; 0: any number. Those beyond it wait.
	Limit int
	// Timeout bounds one reading, which is nobody's own: whoever asked may have left. 0: a minute.
	Timeout time.Duration

	mu    sync.Mutex
	keys  map[string]*flight[T] // the next reading of each; nil while nobody waits. An entry stays for as long as its run goes on
	slots chan struct{}
}

type flight[T any] struct {
	done    chan struct{}
	read    func(context.Context) (T, error)
	value   T
	err     error
	waiting int
}

// Get is what read answers, or what that of another caller does who asks for the same key. The answer is shared: it must not be changed.
func (g *Group[T]) Get(ctx context.Context, name string, read func(context.Context) (T, error)) (T, error) {
	g.mu.Lock()
	if g.keys == nil {
		g.keys = map[string]*flight[T]{}
		if g.Limit > 0 {
			g.slots = make(chan struct{}, g.Limit)
		}
	}
	f, running := g.keys[name]
	if f == nil {
		f = &flight[T]{done: make(chan struct{}), read: read}
		g.keys[name] = f
	}
	f.waiting++
	if !running {
		go g.run(name)
	}
	g.mu.Unlock()
	select {
	case <-f.done:
		return f.value, f.err
	case <-ctx.Done():
		g.mu.Lock()
		f.waiting--
		g.mu.Unlock()
		var none T
		return none, ctx.Err()
	}
}

// run makes one reading after the other for as long as anybody waits for one.
func (g *Group[T]) run(name string) {
	for {
		g.mu.Lock()
		if f := g.keys[name]; f == nil || f.waiting == 0 {
			delete(g.keys, name)
			g.mu.Unlock()
			return
		}
		g.mu.Unlock()
		if g.slots != nil {
			g.slots <- struct{}{}
		}
		g.mu.Lock() // whoever has come while it waited for its turn comes along
		f := g.keys[name]
		g.keys[name] = nil
		g.mu.Unlock()
		f.value, f.err = g.one(f)
		close(f.done)
		if g.slots != nil {
			<-g.slots
		}
	}
}

func (g *Group[T]) one(f *flight[T]) (value T, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("panic: %v", r)
		}
	}()
	timeout := g.Timeout
	if timeout <= 0 {
		timeout = time.Minute
	}
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	value, err = f.read(ctx)
	if err == nil && ctx.Err() != nil {
		err = errors.New("the reading took too long")
	}
	return value, err
}
