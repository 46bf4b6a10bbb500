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

// asks are the questions of one Hedged, and what becomes of them.
type asks struct {
	mu   sync.Mutex
	said []string
}

func (a *asks) say(what string) (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.said = append(a.said, what)
	return len(a.said)
}

func (a *asks) is(t *testing.T, want ...string) {
	t.Helper()
	a.mu.Lock()
	defer a.mu.Unlock()
	if fmt.Sprint(a.said) != fmt.Sprint(want) {
		t.Errorf("%v, want %v", a.said, want)
	}
}

// Of several who are asked one after the other the first answer counts, and the others are told to stop.
func TestWhoDoesNotAnswerIsNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a asks
		got, err := Hedged(t.Context(), time.Second, func(ctx context.Context) (string, error) {
			if a.say("asked") < 3 {
				<-ctx.Done()
				a.say("stopped")
				return "", ctx.Err()
			}
			return "an answer", nil
		})
		if got != "an answer" || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		synctest.Wait()
		a.is(t, "asked", "asked", "asked", "stopped", "stopped")
	})
}

func TestAFailureIsAnAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var a asks
		failed := errors.New("forbidden")
		_, err := Hedged(t.Context(), time.Second, func(context.Context) (string, error) {
			a.say("asked")
			return "", failed
		})
		time.Sleep(time.Minute) // of the bubble's clock
		if !errors.Is(err, failed) {
			t.Error(err)
		}
		a.is(t, "asked")
	})
}

func TestNobodyIsAskedForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		var a asks
		_, err := Hedged(ctx, time.Second, func(ctx context.Context) (string, error) {
			a.say("asked")
			<-ctx.Done()
			return "", ctx.Err()
		})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		a.is(t, "asked", "asked", "asked", "asked")
	})
}

// A question that is with a replica which answers others takes its time, as one does within a process.
func TestWhoAnswersOthersIsNotAskedAgain(t *testing.T) {
	for _, p := range []balancer.Picker{pickerOf("a:1", "a:2"), nil} {
		synctest.Test(t, func(t *testing.T) {
			var a asks
			got, err := Hedged(unaryOf(Noting(t.Context())), time.Second, func(ctx context.Context) (string, error) {
				a.say("asked")
				for range 100 {
					if p != nil {
						_, done := picked(t, p, ctx)
						done(balancer.DoneInfo{}) // another's question is answered
					}
					time.Sleep(time.Second / 10) // of the bubble's clock
				}
				return "an answer", nil
			})
			if got != "an answer" || err != nil {
				t.Errorf("%q, %v", got, err)
			}
			a.is(t, "asked")
		})
	}
}

func TestASilentReplicasQuestionGoesToAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p := pickerOf("a:1", "a:2")
		first, _ := picked(t, p, Preferring(t.Context(), "pods/x/a"))
		other := map[string]string{"a:1": "a:2", "a:2": "a:1"}[first]
		var a asks
		got, err := Hedged(unaryOf(Preferring(t.Context(), "pods/x/a")), AskAgain,
			func(ctx context.Context) (string, error) {
				address, done := picked(t, p, ctx)
				defer done(balancer.DoneInfo{})
				if a.say(address); address == first {
					<-ctx.Done()
				}
				return address, ctx.Err()
			})
		if got != other || err != nil {
			t.Errorf("%q, %v", got, err)
		}
		a.is(t, first, other)
	})
}

// Of two that are slow both are asked, and nobody a third time.
func TestWhoIsKnownIsAskedOnceEach(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		p := pickerOf("a:1", "a:2")
		var a asks
		_, _ = Hedged(unaryOf(Noting(ctx)), AskAgain, func(ctx context.Context) (string, error) {
			picked(t, p, ctx)
			a.say("asked")
			<-ctx.Done()
			return "", ctx.Err()
		})
		a.is(t, "asked", "asked")
	})
}

// A failure of who was asked again is no answer while the first one may still give one.
func TestAFailureDoesNotEndAnothersAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for _, panics := range []bool{false, true} {
			var a asks
			got, err := Hedged(t.Context(), time.Second, func(context.Context) (string, error) {
				if a.say("asked") > 1 {
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
			a.is(t, "asked", "asked")
		}
	})
}
