package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"watershed.dev/platform/guard"
)

// Supervisor runs a service's background tasks and starts again what ends or panics. Its zero value is ready to use.
type Supervisor struct {
	// Ready is what the service waits for. A task that is down counts, and so does whatever else is set there.
	Ready Readiness
	wg    sync.WaitGroup
}

const (
	// leastPause and mostPause are how long a task that ended stays down: longer each time, until it has run for a
	// while.
	leastPause = 100 * time.Millisecond
	mostPause  = 10 * time.Second
	steady     = time.Minute
)

// Go runs a task in a goroutine of its own until ctx is done.
func (s *Supervisor) Go(ctx context.Context, name string, run func(context.Context) error) {
	task := "the task " + name
	s.wg.Go(func() {
		pause := leastPause
		for {
			began := time.Now()
			err := guarded(ctx, name, run)
			if ctx.Err() != nil {
				return
			}
			if err == nil {
				err = errors.New("it ended by itself")
			}
			slog.Error("A background task ended; starting it again", "task", name, "error", err, "pause", pause)
			s.Ready.Set(task, fmt.Errorf("it is down: %w", err))
			if time.Since(began) > steady {
				pause = leastPause
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			pause = min(2*pause, mostPause)
			s.Ready.Set(task, nil)
		}
	})
}

// Wait waits until every task has ended, after ctx has.
func (s *Supervisor) Wait() { s.wg.Wait() }

// guarded makes a panic an error.
func guarded(ctx context.Context, name string, run func(context.Context) error) (err error) {
	defer guard.Error("the task "+name, &err)
	return run(ctx)
}
