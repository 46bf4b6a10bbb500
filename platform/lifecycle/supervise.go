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
	wg   sync.WaitGroup
	mu   sync.Mutex
	down map[string]error
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
			s.note(name, err)
			if time.Since(began) > steady {
				pause = leastPause
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(pause):
			}
			pause = min(2*pause, mostPause)
			s.note(name, nil)
		}
	})
}

func (s *Supervisor) note(name string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.down == nil {
		s.down = map[string]error{}
	}
	if s.down[name] = err; err == nil {
		delete(s.down, name)
	}
}

// Down names a task that is not running now and why, or is nil.
func (s *Supervisor) Down() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, err := range s.down {
		return fmt.Errorf("the task %q is down: %w", name, err)
	}
	return nil
}

// Wait waits until every task has ended, after ctx has.
func (s *Supervisor) Wait() { s.wg.Wait() }

// guarded makes a panic an error.
func guarded(ctx context.Context, name string, run func(context.Context) error) (err error) {
	defer guard.Error("the task "+name, &err)
	return run(ctx)
}
