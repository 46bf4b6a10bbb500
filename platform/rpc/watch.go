package rpc

import (
	"context"
	"errors"
	"io"
	"time"

	"google.golang.org/grpc"
)

// RetryWatch reads a stream of news until ctx is done. Each message goes to each, which is told whether it is its stream's
// first; a stream that ends or cannot be opened goes to lost, with the reason, and is opened anew after a pause.
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
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// Each calls handle with every message of a stream to its end. The error is the stream's, which is nil at its end, or
// handle's.
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
