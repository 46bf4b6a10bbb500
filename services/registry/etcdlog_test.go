package registry

import (
	"context"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// A watch waits for the log of etcd's epoch until the log is late: another registry may have read it.
func TestAWatchWaitsForTheEpoch(t *testing.T) {
	l := &etcdLog{inEpoch: make(chan struct{}), late: make(chan struct{})}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := l.awaitEpoch(ctx); status.Code(err) != codes.Canceled {
		t.Errorf("a canceled watch: %v", err)
	}
	close(l.late)
	if err := l.awaitEpoch(t.Context()); status.Code(err) != codes.Unavailable {
		t.Errorf("a late log: %v", err)
	}
	close(l.inEpoch)
	for range 100 {
		if err := l.awaitEpoch(t.Context()); err != nil {
			t.Fatalf("a log that was late: %v", err)
		}
	}
}
