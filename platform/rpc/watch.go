package rpc

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/lifecycle"
)

// RetryWatch receives messages until ctx is done. It calls handle with each message; first is set for a stream's first
// message. If a stream ends or cannot be opened, RetryWatch calls onError and opens the next stream after pause.
func RetryWatch[M any](ctx context.Context, pause time.Duration,
	open func(context.Context) (grpc.ServerStreamingClient[M], error),
	handle func(m *M, first bool), onError func(error)) {
	for ctx.Err() == nil {
		stream, err := open(ctx)
		for first := true; err == nil; first = false {
			var m *M
			if m, err = stream.Recv(); err == nil {
				handle(m, first)
			}
		}
		if ctx.Err() != nil {
			return
		}
		onError(err)
		_ = lifecycle.Sleep(ctx, pause)
	}
}

// Each calls handle with every message of a stream until the stream ends. It returns the error of the stream or of
// handle, and nil at the end of the stream.
func Each[M any](stream grpc.ServerStreamingClient[M], handle func(*M) error) error {
	for {
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = handle(m)
		}
		if err != nil {
			return err
		}
	}
}
