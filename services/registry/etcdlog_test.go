package registry

import (
	"context"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A watch waits for the log of etcd's epoch until the log is late: another registry may have read it.
func TestAWatchWaitsForTheEpoch(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &etcdLog{inEpoch: make(chan struct{}), late: make(chan struct{})}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		await := func(ctx context.Context) { ended <- l.awaitEpoch(ctx) }
		waits := func() {
			t.Helper()
			synctest.Wait()
			if len(ended) > 0 {
				t.Fatalf("a watch does not wait: %v", <-ended)
			}
		}
		go await(ctx)
		waits()
		cancel()
		if err := <-ended; status.Code(err) != codes.Canceled {
			t.Errorf("a canceled watch: %v", err)
		}
		go await(t.Context())
		waits()
		close(l.late)
		if err := <-ended; status.Code(err) != codes.Unavailable {
			t.Errorf("a late log: %v", err)
		}
		close(l.inEpoch)
		for range 100 {
			if err := l.awaitEpoch(t.Context()); err != nil {
				t.Fatalf("a log that was late: %v", err)
			}
		}
	})
}
