package loopback

import (
	"testing"

	"google.golang.org/grpc"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// broken panics in each watch.
type broken struct{}

func (broken) Watch(*watchfanoutv1.WatchRequest, grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	panic("a bad object")
}

// A panic ends its watch, and not the process.
func TestAPanicEndsItsWatch(t *testing.T) {
	if err := New(nil, broken{}).run(&watchfanoutv1.WatchRequest{}, nil); err == nil {
		t.Error("the watch ends without an error")
	}
}
