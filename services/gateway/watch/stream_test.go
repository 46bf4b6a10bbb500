package watch

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

type frameStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
	frame *watchfanoutv1.WatchFrame
}

func (s frameStream) Recv() (*watchfanoutv1.WatchFrame, error) { return s.frame, nil }

// A frame with boundaries outside of its data ends the stream, and not the process.
func TestMalformedFramesEndTheirStream(t *testing.T) {
	for _, c := range []struct {
		ends []int32
		want codes.Code
	}{
		{nil, codes.OK}, {[]int32{1, 1, 4}, codes.OK},
		{[]int32{5}, codes.Internal}, {[]int32{-1}, codes.Internal}, {[]int32{3, 2}, codes.Internal},
	} {
		m := &watchfanoutv1.WatchFrame{Data: []byte("data")}
		for _, end := range c.ends {
			m.Boundaries = append(m.Boundaries, &watchfanoutv1.EventBoundary{End: end})
		}
		if _, err := (checkedStream{frameStream{frame: m}}).Recv(); status.Code(err) != c.want {
			t.Errorf("%v: %v", c.ends, err)
		}
	}
}
