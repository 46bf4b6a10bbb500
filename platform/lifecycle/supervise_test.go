package lifecycle

import (
	"context"
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestTasksAreRestarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var s Supervisor
		var runs atomic.Int32
		s.Go(ctx, "odd", func(ctx context.Context) error {
			switch runs.Add(1) {
			case 1:
				panic("boom")
			case 2:
				return errors.New("failed")
			case 3:
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		synctest.Wait()
		if err := s.Ready.Err(); err == nil || !strings.Contains(err.Error(), "boom") {
			t.Errorf("after the panic: %v", err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := runs.Load(); n != 4 || s.Ready.Err() != nil {
			t.Errorf("%d runs, down: %v", n, s.Ready.Err())
		}
		cancel()
		s.Wait()
	})
}
