package source

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
)

// A large message that leaves the queue wakes a smaller message behind it.
func TestAMessageThatLeavesWakesTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		limiter := &callLimiter{unread: weights{most: 100}, unsent: weights{most: 1000}}
		slots := map[string]*callSlot{}
		for _, peer := range []string{"a", "b", "c"} {
			slots[peer] = &callSlot{limiter: limiter, peer: peer}
		}
		hand := func(ctx context.Context, peer string, bytes int) <-chan error {
			done := make(chan error, 1)
			go func() {
				done <- limiter.hand(ctx, &message{of: slots[peer], bytes: bytes, handed: make(chan struct{})})
			}()
			synctest.Wait()
			return done
		}
		for peer, bytes := range map[string]int{"a": 30, "b": 50, "c": 10} { // 90 of 100 bytes
			if err := <-hand(t.Context(), peer, bytes); err != nil {
				t.Fatal(err)
			}
		}
		ctx, leave := context.WithCancel(t.Context())
		large, small := hand(ctx, "a", 20), hand(t.Context(), "c", 5)
		select {
		case err := <-small:
			t.Fatalf("the small message overtook the large message: %v", err)
		default:
		}
		leave()
		if err := <-large; !errors.Is(err, context.Canceled) {
			t.Errorf("the large message: %v", err)
		}
		synctest.Wait()
		select {
		case err := <-small:
			if err != nil {
				t.Error(err)
			}
		default:
			t.Error("the small message still waits")
			limiter.taken(&message{of: slots["b"], bytes: 50})
		}
	})
}
