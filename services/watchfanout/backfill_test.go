package watchfanout

import (
	"context"
	"errors"
	"testing"
)

// Resumes from about the same place share a reading; all readings together are bounded; one that nobody waits for ends (F8, S20).
func TestBackfillsAreSharedAndBounded(t *testing.T) {
	b := &backfills{reads: make(chan struct{}, backfillReads)}
	contexts := map[*backfill]context.Context{}
	begin := func(ctx context.Context, f *backfill) { contexts[f] = ctx }
	join := func(resource string, after int64) *backfill {
		t.Helper()
		f, err := b.join(resource, "h", after, begin)
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	first := join("pods", 100)
	if join("pods", 150) != first || join("nodes", 150) == first || join("pods", 50) == first {
		t.Error("the wrong ones share")
	}
	if f, _ := b.join("pods", "another history", 100, begin); f == first {
		t.Error("two histories share")
	}
	b.leave(first)
	if contexts[first].Err() != nil {
		t.Error("it ends though somebody waits")
	}
	b.leave(first)
	if contexts[first].Err() == nil {
		t.Error("it goes on though nobody waits")
	}
	close(first.done)
	n := 0
	for after := int64(1_000_000); ; after-- { // each further back than all before
		_, err := b.join("configmaps", "h", after, begin)
		if errors.Is(err, errBackfills) {
			break
		}
		if n++; n > 2*backfillsBytes/backfillBytes {
			t.Fatal("there is no bound")
		}
	}
	if len(b.all) > backfillsBytes/backfillBytes {
		t.Errorf("%d at once", len(b.all))
	}
}
