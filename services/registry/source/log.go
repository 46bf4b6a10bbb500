package source

import (
	"context"
	"errors"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ReadLog sends stored messages of the event log. The call ends early if another caller needs its slot (callLimiter).
func (s *Source) ReadLog(r *logv1.ReadRequest, stream grpc.ServerStreamingServer[logv1.Chunk]) error {
	log, ok := s.logs[eventlog.LogID(r.Log)]
	if !ok {
		return noLog(r.Log)
	}
	err := s.logReads.run(stream.Context(), func(ctx context.Context, slot *callSlot) (err error) {
		defer recovery.ToError("reading the event log", &err)
		return log.Messages(ctx, r, func(c *logv1.Chunk) error {
			return slot.send(ctx, c, stream.SendMsg)
		})
	})
	if errors.Is(err, eventlog.ErrExpired) {
		return status.Error(codes.OutOfRange, err.Error())
	}
	return rpc.ToStatus(err)
}
