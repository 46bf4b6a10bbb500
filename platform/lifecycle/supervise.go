package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"watershed.dev/platform/recovery"
)

// Supervisor runs a service's background tasks and starts again what ends or panics. Its zero value is ready to use.
type Supervisor struct {
	// Ready is what the service waits for. A task that is down counts, and so does whatever else is set there.
	Ready Readiness
	wg    sync.WaitGroup
}

const (
	// minBackoff and maxBackoff are how long a task that ended stays down: longer each time, until it has run for a
	// while.
	minBackoff   = 100 * time.Millisecond
	maxBackoff   = 10 * time.Second
	backoffReset = time.Minute
)

// Go runs a task in a goroutine of its own until ctx is done.
func (s *Supervisor) Go(ctx context.Context, name string, run func(context.Context) error) {
	task := "the task " + name
	s.wg.Go(func() {
		backoff := minBackoff
		for {
			began := time.Now()
			err := withRecovery(ctx, name, run)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				err = errors.New("it ended by itself")
			}
			slog.Error("A background task ended; starting it again", "task", name, "error", err, "pause", backoff)
			s.Ready.Set(task, fmt.Errorf("it is down: %w", err))
			if time.Since(began) > backoffReset {
				backoff = minBackoff
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(backoff):
			}
			backoff = min(2*backoff, maxBackoff)
			s.Ready.Set(task, nil)
		}
	})
}

// Wait waits until every task has ended, after ctx has.
func (s *Supervisor) Wait() { s.wg.Wait() }

// withRecovery makes a panic an error.
func withRecovery(ctx context.Context, name string, run func(context.Context) error) (err error) {
	defer recovery.ToError("the task "+name, &err)
	return run(ctx)
}
