package rpc

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/balancer"
)

// attemptLog records the calls of fn by a Hedged, and their ends.
type attemptLog struct {
	mu     sync.Mutex
	events []string
}

func (a *attemptLog) record(event string) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.events = append(a.events, event)
	return len(a.events)
}

func (a *attemptLog) expect(t *testing.T, want ...string) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if fmt.Sprint(a.events) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", a.events, want)
	}
}

// Hedged returns the first result, and cancels the other calls.
func TestHedgedReturnsTheFirstResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a attemptLog
		got, err := Hedged(t.Context(), time.Second, func(ctx context.Context) (string, error) {
			if a.record("asked") < 3 {
				<-ctx.Done()
				a.record("stopped")
				return "", ctx.Err()
			}
			return "an answer", nil
		})
		if got != "an answer" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		synctest.Wait()
		a.expect(t, "asked", "asked", "asked", "stopped", "stopped")
	})
}

func TestHedgedReturnsAnError(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a attemptLog
		failed := errors.New("forbidden")
		_, err := Hedged(t.Context(), time.Second, func(context.Context) (string, error) {
			a.record("asked")
			return "", failed
		})
		time.Sleep(time.Minute) // of the bubble's clock
		if !errors.Is(err, failed) {
			t.Error(err)
		}
		a.expect(t, "asked")
	})
}

func TestHedgedStopsAtMaxAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var a attemptLog
		_, err := Hedged(ctx, time.Second, func(ctx context.Context) (string, error) {
			a.record("asked")
			<-ctx.Done()
			return "", ctx.Err()
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		a.expect(t, "asked", "asked", "asked", "asked")
	})
}

// Hedged does not hedge a call whose replica responds to other calls, or a call in process.
func TestResponsiveReplicasAreNotHedged(t *testing.T) {
	for _, p := range []balancer.Picker{pickerOf("a:1", "a:2"), nil} {
		synctest.Test(t, func(t *testing.T) {
			var a attemptLog
			got, err := Hedged(
				unaryOf(TrackReplica(t.Context())),
				time.Second,
				func(ctx context.Context) (string, error) {
					a.record("asked")
					for range 100 {
						if p != nil {
							_, done := picked(t, p, ctx)
							done(balancer.DoneInfo{}) // the replica responds to another call
						}
						time.Sleep(time.Second / 10) // of the bubble's clock
					}
					return "an answer", nil
				},
			)
			if got != "an answer" || err != nil {
				t.Errorf("%q, %v", got, err)
			}
			a.expect(t, "asked")
		})
	}
}

func TestHedgesGoToAnotherReplica(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pickerOf("a:1", "a:2")
		first, _ := picked(t, p, WithAffinity(t.Context(), "pods/x/a"))
		other := map[string]string{"a:1": "a:2", "a:2": "a:1"}[first]
		var a attemptLog
		got, err := Hedged(unaryOf(WithAffinity(t.Context(), "pods/x/a")), HedgeDelay,
			func(ctx context.Context) (string, error) {
				address, done := picked(t, p, ctx)
				defer done(balancer.DoneInfo{})
				if a.record(address); address == first {
					<-ctx.Done()
				}
				return address, ctx.Err()
			})
		if got != other || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		a.expect(t, first, other)
	})
}

// If two replicas are slow, Hedged calls both, and no third time.
func TestTrackedReplicasAreHedgedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		p := pickerOf("a:1", "a:2")
		var a attemptLog
		_, _ = Hedged(unaryOf(TrackReplica(ctx)), HedgeDelay, func(ctx context.Context) (string, error) {
			picked(t, p, ctx)
			a.record("asked")
			<-ctx.Done()
			return "", ctx.Err()
		})
		a.expect(t, "asked", "asked")
	})
}

// An error of a hedge is not the result while the first call may still return.
func TestAFailedHedgeIsNoResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, panics := range []bool{false, true} {
			var a attemptLog
			got, err := Hedged(t.Context(), time.Second, func(context.Context) (string, error) {
				if a.record("asked") > 1 {
					if panics {
						panic("asked again")
					}
					return "", errors.New("no leader")
				}
				time.Sleep(1500 * time.Millisecond) // of the bubble's clock
				return "an answer", nil
			})
			if got != "an answer" || err != nil {
				t.Errorf("%q, %v", got, err)
			}
			a.expect(t, "asked", "asked")
		}
	})
}
