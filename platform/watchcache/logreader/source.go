package logreader

import (
	"context"
	"fmt"
	"log/slog"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Source holds the functions by which a Reader reads the log and etcd.
type Source struct {
	// Stream reads the log's stored messages, and Keys the data keys that they are encrypted with.
	Stream eventlog.StreamReader
	Keys   eventlog.DataKeyFunc
	// Revision returns etcd's current revision.
	Revision func(context.Context) (int64, error)
	// Rows reads a whole resource. A cache of events only does not need it.
	Rows cache.Source
	// ObjectKeys calls each with the namespace, name and revision of every object of a resource at a revision, in the
	// order of etcd's keys. Rows of the keys in sample are complete. UNIMPLEMENTED: the caller must not compare its
	// objects with them.
	ObjectKeys func(ctx context.Context, storageResource string, revision int64, sample []string,
		each func(*registryv1.Row)) error
}

// Remote returns the source of a replica that calls registry for a log and its etcd.
func Remote(registry registryv1.SourceClient, log eventlog.LogID) Source {
	return Source{
		Stream: streamReader{registry, string(log)},
		Keys:   newDataKeyFunc(registry, log),
		Revision: func(ctx context.Context) (int64, error) {
			r, err := registry.Revision(ctx, &registryv1.RevisionRequest{Log: string(log)})
			return r.GetRevision(), err
		},
		ObjectKeys: func(ctx context.Context, storageResource string, revision int64, sample []string,
			each func(*registryv1.Row)) error {
			stream, err := registry.Snapshot(ctx, &registryv1.SnapshotRequest{
				StorageResource: storageResource,
				Log:             string(log),
				Revision:        revision,
				KeysOnly:        true,
				Sample:          sample,
			})
			if err != nil {
				return err
			}
			return rpc.Each(stream, func(chunk *registryv1.SnapshotChunk) error {
				if chunk.Revision != revision { // the registry is of a release without the field
					return errOtherRevision
				}
				for _, row := range chunk.Rows {
					each(row)
				}
				return nil
			})
		},
		Rows: func(ctx context.Context, storageResource string, add func(*registryv1.Row)) (int64, error) {
			revision, err := readSnapshot(ctx, registry, &registryv1.SnapshotRequest{
				StorageResource: storageResource,
				Log:             string(log),
			}, add)
			if err != nil {
				err = fmt.Errorf("snapshot of %s: %w", storageResource, err)
			}
			return revision, err
		},
	}
}

func readSnapshot(
	ctx context.Context,
	registry registryv1.SourceClient,
	r *registryv1.SnapshotRequest,
	add func(*registryv1.Row),
) (revision int64, err error) {
	stream, err := registry.Snapshot(ctx, r)
	if err != nil {
		return 0, err
	}
	objects := 0
	err = rpc.Each(stream, func(chunk *registryv1.SnapshotChunk) error {
		revision = chunk.Revision
		objects += len(chunk.Rows)
		for _, row := range chunk.Rows {
			add(row)
		}
		return nil
	})
	slog.Debug("Read a resource", "resource", r.StorageResource, "objects", objects, "revision", revision, "error", err)
	return revision, err
}
