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
	case <-time.After(2 * time.Minute):
		t.Fatal("no candidate is elected")
		return ""
	}
}

// leads reports whether a candidate leads.
func (l *leaders) leads(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.current[name]
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
		// a candidate that has lost its lease does not receive its resignation at once
		c := &candidate{resign: make(chan struct{}, 1), stop: sync.OnceFunc(func() { cancel(); <-done })}
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
	var stopA func()
	for attempt := 0; ; attempt++ {
		stopA = run("a")
		l.next(t)
		fx.SetFull(t, true)
		stopB := run("b")
		select {
		case name := <-l.elected:
			if l.leads("a") {
				t.Fatalf("%s leads beside a", name)
			}
		case <-time.After(3 * time.Second): // longer than a lease
		}
		if l.leads("a") {
			break
		}
		if attempt == 2 {
			t.Fatal("a has lost its lease")
		}
		stopA() // a pause of the machine has ended a's lease
		stopB()
		fx.SetFull(t, false)
		for len(l.elected) > 0 {
			<-l.elected
		}
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
