package rpc

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/balancer"
)

// Of several who are asked one after the other the first answer counts, and the others are told to stop.
func TestWhoDoesNotAnswerIsNotWaitedFor(t *testing.T) {
	var asked atomic.Int32
	stopped := make(chan struct{}, mostAsked)
	got, err := Hedged(t.Context(), time.Millisecond, func(ctx context.Context) (string, error) {
		if asked.Add(1) < 3 {
			<-ctx.Done()
			stopped <- struct{}{}
			return "", ctx.Err()
		}
		return "an answer", nil
	})
	if got != "an answer" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	<-stopped
	<-stopped
}

func TestAFailureIsAnAnswer(t *testing.T) {
	asked, failed := 0, errors.New("forbidden")
	_, err := Hedged(t.Context(), time.Hour, func(context.Context) (string, error) {
		asked++
		return "", failed
	})
	if !errors.Is(err, failed) || asked != 1 {
		t.Errorf("asked %d times: %v", asked, err)
	}
}

func TestNobodyIsAskedForEver(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	var asked atomic.Int32
	_, err := Hedged(ctx, time.Millisecond, func(ctx context.Context) (string, error) {
		asked.Add(1)
		<-ctx.Done()
		return "", ctx.Err()
	})
	if !errors.Is(err, context.DeadlineExceeded) || asked.Load() != mostAsked {
		t.Errorf("asked %d times: %v", asked.Load(), err)
	}
}

// A question that prefers a replica is asked again where that answers nobody, and not where it takes its time.
func TestOnlyASilentReplicaIsGivenUp(t *testing.T) {
	for _, silent := range []bool{false, true} {
		ctx := Preferring(t.Context(), "pods/x/a")
		p := pickerOf("a:1", "a:2")
		asked := []string{}
		var mu sync.Mutex
		got, err := Hedged(ctx, time.Millisecond, func(ctx context.Context) (string, error) {
			r, err := p.Pick(balancer.PickInfo{Ctx: ctx})
			if err != nil {
				return "", err
			}
			defer r.Done(balancer.DoneInfo{})
			mu.Lock()
			asked = append(asked, r.SubConn.(*conn).address)
			first := len(asked) == 1
			mu.Unlock()
			if !first {
				return "another's answer", nil
			}
			if silent {
				ctx.Value(preferredKey{}).(*preference).to.Load().since.Store(0)
				<-ctx.Done()
				return "", ctx.Err()
			}
			time.Sleep(20 * time.Millisecond) // it takes its time, which is what is tested
			return "its own answer", nil
		})
		want := map[bool]string{false: "its own answer", true: "another's answer"}[silent]
		others := map[bool]int{true: 1}[silent]
		if got != want || err != nil || len(asked) != 1+others || asked[others] == asked[0] != !silent {
			t.Errorf("silent: %v: %q, %v; asked %v", silent, got, err, asked)
		}
	}
}
