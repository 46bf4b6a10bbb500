// Package lifecycle runs the runners of a process. Each runner starts once the runners before it are ready. They stop
// in reverse order. A runner that ends by itself ends the process; only the tasks of a Supervisor are restarted.
//
// Run owns a goroutine per runner, and a Supervisor owns a goroutine per task.
package lifecycle

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// Runner is a component that runs as long as the process.
//
//	starting --Ready--> running --stop--> stopping --Run returns, or StopTimeout--> stopped
//
// If Run returns in another state than stopping, the process ends.
type Runner struct {
	Name string
	// Run serves until ctx is done and leaves no goroutine behind.
	Run func(ctx context.Context) error
	// Ready must be ready before the next runner starts; nil: ready at once.
	Ready *Readiness
	// StopTimeout returns how long the runner may take to stop. It is called at shutdown. nil or 0: the package's
	// StopTimeout.
	StopTimeout func() time.Duration
}

// StopTimeout bounds how long a runner without its own timeout may take to stop.
const StopTimeout = 30 * time.Second

// Observer follows the start and the stop of runners. Its functions may be nil.
type Observer struct {
	// Starting is called before each runner, and Started once all are ready.
	Starting func(name string)
	Started  func()
	// Stopping is called before each runner stops, for at most timeout.
	Stopping func(name string, timeout time.Duration)
}

// Run starts the runners in order, and waits until ctx is done or a runner ends. Then it stops them in reverse order.
// It returns the error of the first runner that ended by itself.
func Run(ctx context.Context, runners []Runner, o Observer) error {
	type running struct {
		name   string
		cancel context.CancelFunc
		done   chan struct{}
		stop   func() time.Duration
	}
	var all []running
	failed := make(chan error, len(runners))
	defer func() {
		for i := len(all) - 1; i >= 0; i-- {
			timeout := StopTimeout
			if all[i].stop != nil {
				timeout = cmp.Or(all[i].stop(), StopTimeout)
			}
			if o.Stopping != nil {
				o.Stopping(all[i].name, timeout)
			}
			all[i].cancel()
			select {
			case <-all[i].done:
			case <-time.After(timeout):
				slog.Error("A runner does not stop", "runner", all[i].name)
			}
		}
	}()
	for _, p := range runners {
		if o.Starting != nil {
			o.Starting(p.Name)
		}
		runnerCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		r := running{p.Name, cancel, make(chan struct{}), p.StopTimeout}
		all = append(all, r)
		go func() {
			defer close(r.done)
			if err := p.Run(runnerCtx); err != nil && !errors.Is(err, context.Canceled) {
				failed <- fmt.Errorf("%s: %w", p.Name, err)
			} else if runnerCtx.Err() == nil {
				failed <- fmt.Errorf("%s: ended by itself", p.Name)
			}
		}()
		if err := waitReady(ctx, p, failed); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			return err
		}
	}
	if o.Started != nil {
		o.Started()
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

// slowStart is the interval of log lines about a runner that is not ready.
const slowStart = 10 * time.Second

func waitReady(ctx context.Context, p Runner, failed chan error) error {
	if p.Ready == nil {
		return nil
	}
	slow := time.NewTicker(slowStart)
	defer slow.Stop()
	for {
		changed, reason := p.Ready.get()
		if reason == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case err := <-failed:
			return err
		case <-changed:
		case <-slow.C:
			slog.Warn("Still waiting for a runner", "runner", p.Name, "reason", reason)
		}
	}
}

// Sleep waits for a duration. It returns the error of ctx if ctx ends first.
func Sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(d):
		return nil
	}
}

// Age returns the time since t by the monotonic clock or by the wall clock, whichever is longer. The monotonic clock
// stops while the machine is suspended, and the wall clock may go back. Data therefore expires too early, not too late.
func Age(t time.Time) time.Duration {
	now := time.Now()
	return max(now.Sub(t), now.Round(0).Sub(t.Round(0)))
}

// SignalContext returns a context that ends at the first SIGINT or SIGTERM. A further SIGINT ends the process at once.
// A further SIGTERM does not, because a child of `split` may receive it from systemd and from `split`.
func SignalContext() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	c := make(chan os.Signal, 2)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM)
	go endAtSignals(c, cancel, os.Exit)
	return ctx, cancel
}

// endAtSignals calls cancel at the first signal, and exit at each further SIGINT.
func endAtSignals(c <-chan os.Signal, cancel func(), exit func(code int)) {
	<-c
	cancel()
	for s := range c {
		if s == syscall.SIGINT {
			exit(1)
		}
	}
}
