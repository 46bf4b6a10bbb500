package election_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"watershed.dev/services/registry/election"
	"watershed.dev/services/registry/internal/fixture"
)

// leaders records the current leaders and the largest number of concurrent leaders.
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
		t.Fatal("no candidate is elected")
		return ""
	}
}

// Only a single candidate leads at a time. Another follows after a resignation or the end of the leader.
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
			e := election.Candidate{
				Client:   fx.Resources.Storage.Client.Client,
				Key:      "/watershed/test",
				Identity: name,
				Lead:     l.lead(name, c.resign),
			}
			_ = e.Run(ctx)
		}()
		t.Cleanup(c.stop)
	}
	first := l.next(t)
	all[first].resign <- struct{}{}
	second := l.next(t)
	if second == first {
		t.Errorf("%s resigns and leads again", first)
	}
	all[second].stop() // the leader revokes its lease, which need not run out
	if third := l.next(t); third != first {
		t.Errorf("%s leads", third)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.maxConcurrent != 1 {
		t.Errorf("%d led at a time", l.maxConcurrent)
	}
}

// A full etcd grants no lease. The leader keeps its lease. After it ends, another candidate leads without a lease until
// etcd has space.
func TestACandidateLeadsWithoutLease(t *testing.T) {
	fx := fixture.New(t)
	l := &leaders{current: map[string]bool{}, elected: make(chan string, 10)}
	run := func(name string) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		c := election.Candidate{
			Client:           fx.Resources.Storage.Client.Client,
			Key:              "/watershed/test",
			Identity:         name,
			Lead:             l.lead(name, nil),
			LeadWithoutLease: l.lead(name+" without lease", nil),
		}
		go func() {
			defer close(done)
			_ = c.Run(ctx)
		}()
		stop = sync.OnceFunc(func() { cancel(); <-done })
		t.Cleanup(stop)
		return stop
	}
	stopA := run("a")
	first := l.next(t)
	fx.SetFull(t, true)
	run("b")
	select {
	case name := <-l.elected:
		t.Fatalf("%s leads beside %s", name, first)
	case <-time.After(3 * time.Second): // longer than a lease
	}
	stopA()
	if second := l.next(t); second != "b without lease" {
		t.Errorf("%s leads", second)
	}
	fx.SetFull(t, false)
	if third := l.next(t); third != "b" {
		t.Errorf("%s leads", third)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.maxConcurrent != 1 {
		t.Errorf("%d led at a time", l.maxConcurrent)
	}
}
