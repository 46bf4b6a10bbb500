package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"
)

// recorder records the events of runners in order.
type recorder struct {
	mu     sync.Mutex
	events []string
}

func (s *recorder) record(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, fmt.Sprintf(format, args...))
}

func (s *recorder) runner(name string, readyAfter time.Duration) Runner {
	ready := &Readiness{}
	ready.Set(name, errors.New("not yet"))
	return Runner{
		Name:  name,
		Ready: ready,
		Run: func(ctx context.Context) error {
			time.AfterFunc(readyAfter, func() { ready.Set(name, nil) })
			s.record("%s runs", name)
			<-ctx.Done()
			s.record("%s ends", name)
			return ctx.Err()
		},
	}
}

// Each runner starts once the previous runner is ready. They stop in reverse order.
func TestRunnersStartInOrderAndStopInReverse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &recorder{}
		ctx, cancel := context.WithCancel(t.Context())
		err := Run(ctx,
			[]Runner{s.runner("etcd", 3*time.Second), s.runner("nats", 0), s.runner("registry", time.Second)},
			Observer{
				Starting: func(name string) { s.record("%s starts", name) },
				Started:  func() { s.record("started"); cancel() },
				Stopping: func(name string, timeout time.Duration) { s.record("%s stops in %v", name, timeout) },
			})
		want := "etcd starts, etcd runs, nats starts, nats runs, registry starts, registry runs, started, " +
			"registry stops in 30s, registry ends, nats stops in 30s, nats ends, etcd stops in 30s, etcd ends"
		if got := strings.Join(s.events, ", "); got != want || err != nil {
			t.Errorf("%s (%v)", got, err)
		}
	})
}

// A runner that ends by itself ends the process, with its error. A runner that never becomes ready does not delay the
// end.
func TestAnEndedRunnerEndsTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &recorder{}
		fails := Runner{
			Name:  "nats",
			Ready: &Readiness{},
			Run:   func(context.Context) error { return errors.New("no disk") },
		}
		fails.Ready.Set("nats", errors.New("not yet"))
		err := Run(t.Context(), []Runner{s.runner("etcd", 0), fails, s.runner("registry", 0)}, Observer{})
		if err == nil || err.Error() != "nats: no disk" || strings.Join(s.events, ", ") != "etcd runs, etcd ends" {
			t.Errorf("%v after %q", err, s.events)
		}
		quits := Runner{Name: "debug", Run: func(context.Context) error { return nil }}
		if err := Run(t.Context(), []Runner{quits}, Observer{}); err == nil || err.Error() != "debug: ended by itself" {
			t.Errorf("%v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := Run(ctx, []Runner{s.runner("registry", time.Hour)}, Observer{}); err != nil {
			t.Errorf("stopped while it starts: %v", err)
		}
	})
}

// Run does not wait for a runner beyond its StopTimeout.
func TestStopTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hangs := make(chan struct{})
		stuck := Runner{
			Name:        "stuck",
			StopTimeout: func() time.Duration { return time.Minute },
			Run:         func(context.Context) error { <-hangs; return nil },
		}
		ctx, cancel := context.WithCancel(t.Context())
		began := time.Now()
		if err := Run(ctx, []Runner{stuck}, Observer{Started: cancel}); err != nil || time.Since(began) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		close(hangs)
	})
}

// Err returns the first reason by name. OnChange notifies of every change.
func TestOnChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r Readiness
		r.Set("log", errors.New("still read"))
		var received []string
		ctx, cancel := context.WithCancel(t.Context())
		go r.OnChange(ctx, func(err error) { received = append(received, fmt.Sprint(err)) })
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
		if got := strings.Join(received, ", "); got != want {
			t.Error(got)
		}
	})
}

// A second SIGTERM does not end the process, because systemd and split both send it. A second SIGINT does.
func TestOnlyAFurtherSIGINTEndsTheProcess(t *testing.T) {
	for further, want := range map[os.Signal]int{syscall.SIGTERM: 0, syscall.SIGINT: 1} {
		c, done, exits := make(chan os.Signal), make(chan struct{}), 0
		go func() {
			defer close(done)
			endAtSignals(c, func() {}, func(int) { exits++ })
		}()
		c <- syscall.SIGTERM
		c <- further
		close(c)
		if <-done; exits != want {
			t.Errorf("%v: %d exits", further, exits)
		}
	}
}

// The age is the longer time of both clocks. The monotonic clock stops in a suspended machine, and the wall clock may
// go back.
func TestAgeIsTheLongerTimeOfBothClocks(t *testing.T) {
	now := time.Now()
	// with returns now with another monotonic reading, which time.Time keeps in its second field.
	with := func(monotonic time.Duration) time.Time {
		changed := now
		fields := (*struct {
			wall uint64
			ext  int64
			loc  *time.Location
		})(unsafe.Pointer(&changed))
		fields.ext += int64(monotonic)
		return changed
	}
	for name, x := range map[string]struct {
		t    time.Time
		want time.Duration
	}{
		"both clocks":               {now.Add(-time.Hour), time.Hour},
		"suspended for an hour":     {with(time.Hour).Add(-time.Hour), time.Hour},
		"wall clock an hour behind": {with(-time.Hour), time.Hour},
	} {
		if age := Age(x.t); age < x.want || age > x.want+time.Minute {
			t.Errorf("%s: %v", name, age)
		}
	}
}
