package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// said is what parts do, in order.
type said struct {
	mu  sync.Mutex
	all []string
}

func (s *said) say(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, fmt.Sprintf(format, args...))
}

func (s *said) part(name string, readyAfter time.Duration) Part {
	ready := &Readiness{}
	ready.Set(name, errors.New("not yet"))
	return Part{
		Name:  name,
		Ready: ready,
		Run: func(ctx context.Context) error {
			time.AfterFunc(readyAfter, func() { ready.Set(name, nil) })
			s.say("%s runs", name)
			<-ctx.Done()
			s.say("%s ends", name)
			return ctx.Err()
		},
	}
}

// Parts start one after the other, each once the one before is ready, and stop in the opposite order.
func TestPartsStartInOrderAndStopInTheOpposite(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &said{}
		ctx, cancel := context.WithCancel(t.Context())
		err := Run(ctx, []Part{s.part("etcd", 3*time.Second), s.part("nats", 0), s.part("registry", time.Second)},
			func(name string) { s.say("%s starts", name) },
			func() { s.say("started"); cancel() })
		want := "etcd starts, etcd runs, nats starts, nats runs, registry starts, registry runs, started, " +
			"registry ends, nats ends, etcd ends"
		if got := strings.Join(s.all, ", "); got != want || err != nil {
			t.Errorf("%s (%v)", got, err)
		}
	})
}

// A part that ends on its own ends the process, with its error; one that never becomes ready does not keep it.
func TestAPartThatEndsEndsTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &said{}
		fails := Part{
			Name:  "nats",
			Ready: &Readiness{},
			Run:   func(context.Context) error { return errors.New("no disk") },
		}
		fails.Ready.Set("nats", errors.New("not yet"))
		err := Run(t.Context(), []Part{s.part("etcd", 0), fails, s.part("registry", 0)}, nil, nil)
		if err == nil || err.Error() != "nats: no disk" || strings.Join(s.all, ", ") != "etcd runs, etcd ends" {
			t.Errorf("%v after %q", err, s.all)
		}
		quits := Part{Name: "debug", Run: func(context.Context) error { return nil }}
		if err := Run(t.Context(), []Part{quits}, nil, nil); err == nil || err.Error() != "debug: ended by itself" {
			t.Errorf("%v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := Run(ctx, []Part{s.part("registry", time.Hour)}, nil, nil); err != nil {
			t.Errorf("told to stop while it starts: %v", err)
		}
	})
}

// A part that does not stop is left behind.
func TestAPartThatDoesNotStopIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan struct{})
		stuck := Part{
			Name:        "stuck",
			StopTimeout: func() time.Duration { return time.Minute },
			Run:         func(context.Context) error { <-hangs; return nil },
		}
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		if err := Run(ctx, []Part{stuck}, nil, cancel); err != nil || time.Since(began) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		close(hangs)
	})
}

// A readiness tells one reason at a time, by name, and whoever follows it of every change.
func TestAReadinessIsFollowed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Readiness
		r.Set("log", errors.New("still read"))
		var told []string
		ctx, cancel := context.WithCancel(t.Context())
		go r.OnChange(ctx, func(err error) { told = append(told, fmt.Sprint(err)) })
		for _, change := range []func(){
			func() { r.Set("catalog", errors.New("not told")) },
			func() { r.Set("log", nil) },
			func() { r.Set("log", nil) }, // nothing new
			func() { r.Set("catalog", nil) },
		} {
			synctest.Wait()
			change()
		}
		synctest.Wait()
		cancel()
		synctest.Wait()
		want := "log: still read, catalog: not told, catalog: not told, <nil>"
		if got := strings.Join(told, ", "); got != want {
			t.Error(got)
		}
	})
}
