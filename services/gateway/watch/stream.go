package watch

import (
	"context"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/watchcache/core"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// openStream opens a stream of a replica. A replica's frames are not trusted: a malformed frame ends the stream.
func (h *Hub) openStream(ctx context.Context, r *watchfanoutv1.WatchRequest) (
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame], error) {
	s, err := h.Client.Watch(ctx, r, grpc.WaitForReady(false))
	if err != nil {
		return nil, err
	}
	return checkedStream{s}, nil
}

// checkedStream is a stream whose frames have valid boundaries.
type checkedStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
}

// Recv returns the next frame.
func (s checkedStream) Recv() (*watchfanoutv1.WatchFrame, error) {
	m, err := s.ServerStreamingClient.Recv()
	if err == nil && !core.ValidBoundaries(m) {
		return nil, errMalformed
	}
	return m, err
}

var errMalformed = status.Error(codes.Internal, "a replica sent a frame with boundaries outside of its data")
