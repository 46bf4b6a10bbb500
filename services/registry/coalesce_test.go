package registry

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
)

// A thousand callers cost two reads, and nobody gets the answer of a read that began before it asked.
func TestRevisionReadsAreSharedAndFresh(t *testing.T) {
	var reads atomic.Int64
	began, release := make(chan struct{}), make(chan struct{})
	c := &coalescer{read: func(context.Context) (int64, error) {
		n := reads.Add(1)
		if n == 1 {
			close(began)
			<-release
		}
		return n, nil
	}}
	var wg sync.WaitGroup
	wg.Go(func() {
		if r, err := c.get(t.Context()); r != 1 || err != nil {
			t.Errorf("the first got %d, %v", r, err)
		}
	})
	<-began
	asked := make(chan struct{}, 1000)
	for range 1000 {
		wg.Go(func() {
			asked <- struct{}{}
			if r, err := c.get(t.Context()); r < 2 || err != nil {
				t.Errorf("one that asked during the first read got %d, %v", r, err)
			}
		})
	}
	for range 1000 {
		<-asked
	}
	close(release)
	wg.Wait()
	if n := reads.Load(); n > 20 {
		t.Errorf("%d reads for 1001 callers", n)
	}
}
