package apiclient

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"
)

// Of several who are asked one after the other the first answer counts, and the others are told to stop.
func TestWhoDoesNotAnswerIsNotWaitedFor(t *testing.T) {
	var asked atomic.Int32
	stopped := make(chan struct{}, mostAsked)
	got, err := hedged(t.Context(), time.Millisecond, func(ctx context.Context) (string, error) {
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
	_, err := hedged(t.Context(), time.Hour, func(context.Context) (string, error) {
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
	_, err := hedged(ctx, time.Millisecond, func(ctx context.Context) (string, error) {
		asked.Add(1)
		<-ctx.Done()
		return "", ctx.Err()
	})
	if !errors.Is(err, context.DeadlineExceeded) || asked.Load() != mostAsked {
		t.Errorf("asked %d times: %v", asked.Load(), err)
	}
}
