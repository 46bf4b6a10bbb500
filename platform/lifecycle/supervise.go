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

// Supervisor runs a service's background tasks. It restarts a task that ends or panics. Its zero value is ready to
// use.
//
//	running --ends or panics--> down, not ready --backoff--> running
type Supervisor struct {
	// Ready is not ready while a task is down. The service may set other reasons.
	Ready Readiness
	wg    sync.WaitGroup
}

const (
	// minBackoff and maxBackoff bound the delay before a restart. The delay doubles each time, until a task has run
	// for backoffReset.
	minBackoff   = 100 * time.Millisecond
	maxBackoff   = 10 * time.Second
	backoffReset = time.Minute
)

// Go runs a task in a new goroutine until ctx is done.
func (s *Supervisor) Go(ctx context.Context, name string, run func(context.Context) error) {
	task := "task " + name
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
			slog.Error("A background task ended; it is restarted", "task", name, "error", err, "backoff", backoff)
			s.Ready.Set(task, fmt.Errorf("it is down: %w", err))
			if time.Since(began) > backoffReset {
				backoff = minBackoff
			}
			if Sleep(ctx, backoff) != nil {
				return
			}
			backoff = min(2*backoff, maxBackoff)
			s.Ready.Set(task, nil)
		}
	})
}

// Wait waits until every task has ended. Cancel their ctx first.
func (s *Supervisor) Wait() { s.wg.Wait() }

// withRecovery converts a panic of run into an error.
func withRecovery(ctx context.Context, name string, run func(context.Context) error) (err error) {
	defer recovery.ToError("task "+name, &err)
	return run(ctx)
}
