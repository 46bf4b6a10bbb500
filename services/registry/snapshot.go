package registry

import (
	"context"
	"runtime"
	"sync"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/encoder"
	"watershed.dev/services/registry/storage"
)

// snapshotPage is how many objects one etcd read and one chunk hold.
const snapshotPage = 500

// Snapshot sends every object of a stored resource, as it was at one revision.
func (s *Service) Snapshot(r *registryv1.SnapshotRequest, stream grpc.ServerStreamingServer[registryv1.SnapshotChunk]) error {
	ctx := stream.Context()
	// The revision comes first: a definition that changes after it was read is told of in the log after this revision.
	revision, err := s.readRevision(ctx)
	if err != nil {
		return rpc.ToStatus(err)
	}
	st, err := s.stored(ctx, r.StoredAs)
	if err != nil {
		return err
	}
	key, end := st.Prefix, clientv3.GetPrefixRangeEnd(st.Prefix)
	for {
		resp, err := s.store.Client.Client.Get(ctx, key, clientv3.WithRange(end), clientv3.WithLimit(snapshotPage), clientv3.WithRev(revision))
		if err != nil {
			return rpc.ToStatus(err)
		}
		rows, err := rowsOf(ctx, st, resp.Kvs)
		if err != nil {
			return rpc.ToStatus(err)
		}
		if err := stream.Send(&registryv1.SnapshotChunk{Revision: revision, Rows: rows}); err != nil {
			return err
		}
		if !resp.More {
			return nil
		}
		key = string(resp.Kvs[len(resp.Kvs)-1].Key) + "\x00"
	}
}

// stored finds how a resource's objects are read: for a custom resource, by its definition as it is now in etcd.
func (s *Service) stored(ctx context.Context, name string) (*storage.Stored, error) {
	if st, ok := s.store.ByName(name); ok {
		return st, nil
	}
	st, err := s.customs.Stored(ctx, name)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	if st == nil {
		return nil, status.Errorf(codes.NotFound, "no stored resource %q", name)
	}
	return st, nil
}

// rowsOf encodes on every processor.
func rowsOf(ctx context.Context, st *storage.Stored, kvs []*mvccpb.KeyValue) ([]*registryv1.Row, error) {
	rows := make([]*registryv1.Row, len(kvs))
	workers := min(runtime.GOMAXPROCS(0), len(kvs))
	errs := make([]error, workers)
	var wg sync.WaitGroup
	for w := range workers {
		wg.Go(func() {
			for i := w; i < len(kvs) && errs[w] == nil; i += workers {
				rows[i], errs[w] = st.Row(ctx, string(kvs[i].Key), kvs[i].Value, kvs[i].ModRevision)
			}
		})
	}
	wg.Wait()
	for _, err := range errs {
		if err != nil {
			return nil, err
		}
	}
	return rows, nil
}

// Encode turns stored encodings into another version, or into Table rows.
func (s *Service) Encode(ctx context.Context, r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	if err := s.customs.NotBefore(ctx, r.StoredAs, r.DefinedAt); err != nil {
		return nil, rpc.ToStatus(err)
	}
	e, err := s.endpoint(ctx, r.Resource)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	if e.Entry.GetUntyped() {
		resp, err := encoder.EncodeUntyped(ctx, e, r)
		return resp, rpc.ToStatus(err)
	}
	st, ok := s.store.ByName(r.StoredAs)
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no stored resource %q", r.StoredAs)
	}
	resp, err := encoder.Encode(ctx, e, st, r)
	return resp, rpc.ToStatus(err)
}
