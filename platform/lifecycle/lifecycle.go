// Package lifecycle runs the parts of a process: each starts once those it needs are ready, and they stop in the
// opposite order. A part that ends on its own ends the process.
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

// Runner is something that runs for as long as the process does.
type Runner struct {
	Name string
	// Run serves until ctx is done and leaves no goroutine behind.
	Run func(ctx context.Context) error
	// Ready is waited for before the next part starts; nil means ready at once.
	Ready *Readiness
	// StopTimeout says, when it is told to stop, how long that may take; nil or 0: StopTimeout of the package.
	StopTimeout func() time.Duration
}

// StopTimeout bounds how long a part may take to stop that does not say.
const StopTimeout = 30 * time.Second

// Run starts parts in order, calls started, waits for ctx's end or a part's, and stops them in the opposite order.
// The error is that of the part that ended first on its own.
func Run(ctx context.Context, runners []Runner, onStarting func(name string), onStarted func()) error {
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
			all[i].cancel()
			select {
			case <-all[i].done:
			case <-time.After(timeout):
				slog.Error("A part does not stop", "part", all[i].name)
			}
		}
	}()
	for _, p := range runners {
		if onStarting != nil {
			onStarting(p.Name)
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
	if onStarted != nil {
		onStarted()
	}
	select {
	case <-ctx.Done():
		return nil
	case err := <-failed:
		return err
	}
}

// slowStart is how long a part may take to be ready before that is told, and how often then.
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
			slog.Warn("Still waiting", "part", p.Name, "reason", reason)
		}
	}
}

// SignalContext returns a context that ends at the first SIGINT or SIGTERM; a second signal ends the process at once.
func SignalContext() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	c := make(chan os.Signal, 2)
	signal.Notify(c, syscall.SIGINT, syscall.SIGTERM)
	go func() {
		<-c
		cancel()
		<-c
		os.Exit(1)
	}()
	return ctx, cancel
}
