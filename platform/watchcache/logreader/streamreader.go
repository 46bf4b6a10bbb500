package logreader

import (
	"context"
	"errors"
	"io"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// streamReader reads a log's stream through registry.
type streamReader struct {
	source registryv1.SourceClient
	log    string
}

// Messages implements eventlog.StreamReader.
func (s streamReader) Messages(ctx context.Context, r *logv1.ReadRequest, each func(*logv1.Chunk) error) error {
	r = &logv1.ReadRequest{Sequence: r.Sequence, StorageResource: r.StorageResource, After: r.After, Log: s.log}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	chunks, err := s.source.ReadLog(ctx, r)
	for err == nil {
		var c *logv1.Chunk
		if c, err = chunks.Recv(); err == nil {
			if err := each(c); err != nil {
				return err
			}
		}
	}
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case status.Code(err) == codes.OutOfRange:
		return eventlog.ErrExpired
	}
	return err
}
