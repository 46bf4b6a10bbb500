package election_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"watershed.dev/services/registry/election"
	"watershed.dev/services/registry/internal/fixture"
)

// leaders says who leads, and counts how many ever led at a time.
type leaders struct {
	mu            sync.Mutex
	current       map[string]bool
	maxConcurrent int
	elected       chan string
}

func (l *leaders) lead(name string, resign <-chan struct{}) func(context.Context) error {
	return func(ctx context.Context) error {
		l.mu.Lock()
		l.current[name] = true
		l.maxConcurrent = max(l.maxConcurrent, len(l.current))
		l.mu.Unlock()
		l.elected <- name
		defer func() {
			l.mu.Lock()
			delete(l.current, name)
			l.mu.Unlock()
		}()
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-resign:
			return nil
		}
	}
}

func (l *leaders) next(t *testing.T) string {
	t.Helper()
	select {
	case name := <-l.elected:
		return name
	case <-time.After(30 * time.Second):
		t.Fatal("nobody is elected")
		return ""
	}
}

// One leads at a time; who resigns, or ends, is followed by another.
func TestOneLeadsAtATime(t *testing.T) {
	fx := fixture.New(t)
	l := &leaders{current: map[string]bool{}, elected: make(chan string, 10)}
	type candidate struct {
		resign chan struct{}
		stop   func()
	}
	all := map[string]*candidate{}
	for _, name := range []string{"a", "b"} {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		c := &candidate{resign: make(chan struct{}), stop: sync.OnceFunc(func() { cancel(); <-done })}
		all[name] = c
		go func() {
			defer close(done)
			_ = election.Run(ctx, fx.Resources.Storage.Client.Client, "/watershed/test", name, l.lead(name, c.resign), func() {})
		}()
		t.Cleanup(c.stop)
	}
	first := l.next(t)
	all[first].resign <- struct{}{}
	second := l.next(t)
	if second == first {
		t.Errorf("%s resigns and leads again", first)
	}
	all[second].stop() // its key goes with it, and need not run out
	if third := l.next(t); third != first {
		t.Errorf("%s leads", third)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.maxConcurrent != 1 {
		t.Errorf("%d led at a time", l.maxConcurrent)
	}
}
