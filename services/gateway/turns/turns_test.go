package turns

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// take starts Take of a turn for an owner, and appends name to order when it returns.
func take(t *testing.T, s *Turns, owner, name string, order *[]string) *Turn {
	turn, ctx := s.NewTurn(t.Context(), owner)
	go func() {
		if err := turn.Take(ctx); err != nil {
			t.Error(err)
		}
		*order = append(*order, name)
	}()
	synctest.Wait()
	return turn
}

// Owners get turns in rotation, and the responses of an owner in order.
func TestOwnersRotate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(1, time.Hour)
		var order []string
		turns := map[string]*Turn{}
		for _, name := range []string{"a1", "a2", "a3", "b1", "c1", "b2"} {
			turns[name] = take(t, s, name[:1], name, &order)
		}
		want := []string{"a1", "a2", "b1", "c1", "a3", "b2"}
		for i, name := range want {
			if !slices.Equal(order, want[:i+1]) {
				t.Fatalf("%s, want %s", order, want[:i+1])
			}
			turns[name].Yield()
			synctest.Wait()
		}
		if s.held+len(s.waiting)+len(s.ownerQueue) > 0 {
			t.Errorf("%d turns are held, owners %s wait", s.held, s.ownerQueue)
		}
	})
}

// As many turns are held as the limit allows, and a turn that is held is not taken again.
func TestTurnsAreLimited(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(2, time.Hour)
		var order []string
		first := take(t, s, "a", "first", &order)
		take(t, s, "a", "second", &order)
		third := take(t, s, "a", "third", &order)
		if err := first.Take(t.Context()); err != nil || len(order) != 2 || s.held != 2 {
			t.Errorf("%v: %s have a turn, %d are held", err, order, s.held)
		}
		first.Yield()
		first.Yield()
		synctest.Wait()
		if len(order) != 3 || !third.held || s.held != 2 {
			t.Errorf("%s have a turn, %d are held", order, s.held)
		}
	})
}

// A response that does not yield loses its turn.
func TestATurnExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(1, time.Minute)
		var order []string
		first := take(t, s, "a", "first", &order)
		began := time.Now()
		second, ctx := s.NewTurn(t.Context(), "b")
		if err := second.Take(ctx); err != nil || time.Since(began) != time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		if err := first.Take(t.Context()); err != nil || time.Since(began) != 2*time.Minute {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// A response that ends while it waits leaves the queue.
func TestAResponseThatEndsTakesNoTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(1, time.Hour)
		var order []string
		first := take(t, s, "a", "first", &order)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error)
		second, ctx := s.NewTurn(ctx, "b")
		go func() { ended <- second.Take(ctx) }()
		synctest.Wait()
		take(t, s, "c", "third", &order)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		first.Yield()
		synctest.Wait()
		if got := strings.Join(order, " "); got != "first third" || len(s.ownerQueue) > 0 {
			t.Errorf("%s have had a turn, owners %s wait", got, s.ownerQueue)
		}
	})
}
