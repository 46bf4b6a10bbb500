// Package source implements the Source contract for the watch tier. It sends snapshots of stored resources, etcd's
// revision, messages of the event log, and objects in other versions or as Table rows.
//
// It holds no state of objects: each snapshot reads etcd. Streaming calls have limits per peer (callLimiter). Each call
// runs in its own goroutine, which may outlive a canceled call and keeps its slot until it returns.
package source

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/conversion"
	"watershed.dev/services/registry/lookup"
	"watershed.dev/services/registry/storage"
)

const (
	// rowsBytes is about how many bytes of rows a message holds. A larger row has a message to itself.
	rowsBytes = 4 << 20
	// maxSnapshots and maxLogReads bound the concurrent calls of Snapshot and of ReadLog. A snapshot holds a page of
	// objects and the rows of a message in two encodings. A call of ReadLog holds a chunk of the log. mostUnread bounds
	// the bytes that the transport holds.
	maxSnapshots = 32
	maxLogReads  = 128
	// maxSample bounds SnapshotRequest.sample.
	maxSample = 100
)

// Source reads etcd and the event log for the watch tier.
type Source struct {
	registryv1.UnimplementedSourceServer
	resources *lookup.Resources
	revisions coalesce.Group[int64]
	dataKeys  *storage.DataKeys
	logs      map[eventlog.LogID]eventlog.StreamReader
	snapshots callLimiter
	logReads  callLimiter
}

// New returns a source of the served resources and of the event logs. dataKeys decrypt the logs.
func New(r *lookup.Resources, dataKeys *storage.DataKeys, logs map[eventlog.LogID]eventlog.StreamReader) *Source {
	return &Source{
		resources: r,
		dataKeys:  dataKeys,
		revisions: coalesce.Group[int64]{Timeout: readTimeout},
		logs:      logs,
		snapshots: callLimiter{
			maxCalls: maxSnapshots,
			unread:   weights{most: mostUnread},
			unsent:   weights{most: math.MaxInt}, // no limit: an interrupted snapshot starts over
		},
		logReads: callLimiter{
			maxCalls: maxLogReads,
			unread:   weights{most: mostUnread},
			unsent:   weights{most: mostUnread},
		},
	}
}

// DataKey returns a key that messages of the log are encrypted with.
func (s *Source) DataKey(ctx context.Context, r *registryv1.DataKeyRequest) (*registryv1.DataKeyResponse, error) {
	secret, err := s.ReadDataKey(ctx, eventlog.LogID(r.Log), r.StorageResource, r.Key)
	if errors.Is(err, eventlog.ErrNoKey) {
		return nil, status.Error(codes.FailedPrecondition, strings.ToValidUTF8(err.Error(), "\ufffd"))
	}
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	return &registryv1.DataKeyResponse{Secret: secret}, nil
}

// ReadDataKey returns a key that messages of a log are encrypted with. The log may have events of a resource from
// before --etcd-servers-overrides moved it. They have no key, so that their reader waits for no other etcd.
func (s *Source) ReadDataKey(ctx context.Context, log eventlog.LogID, storageResource, key string) ([]byte, error) {
	st, err := s.resources.StorageResource(ctx, storageResource)
	if err != nil {
		return nil, keyError(err)
	}
	if st.Etcd.Log != log {
		return nil, fmt.Errorf("%w: the event log %q does not have %s", eventlog.ErrNoKey, log, storageResource)
	}
	return s.dataKeys.Get(ctx, st, key)
}

// keyError returns the error of a key whose resource is not found. It is temporary if etcd did not respond, or if the
// caller has left. Otherwise the resource is not served, and no registry has the key.
func keyError(err error) error {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return err
	}
	return fmt.Errorf("%w: %w", eventlog.ErrNoKey, err)
}

// readTimeout bounds a read of etcd's revision. Callers may give up earlier.
const readTimeout = 5 * time.Second

// Revision returns etcd's current revision and the error of encryption at rest, if there is any.
func (s *Source) Revision(ctx context.Context, r *registryv1.RevisionRequest) (*registryv1.RevisionResponse, error) {
	etcd, err := s.etcdOf(r.Log)
	if err != nil {
		return nil, err
	}
	revision, err := s.CurrentRevision(ctx, etcd)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	resp := &registryv1.RevisionResponse{Revision: revision}
	if err := s.resources.Storage.EncryptionErr(); err != nil {
		resp.EncryptionError = err.Error()
	}
	return resp, nil
}

// etcdOf returns the etcd of an event log. It fails if the caller knows other etcds than this registry.
func (s *Source) etcdOf(log string) (*storage.Etcd, error) {
	if etcd, ok := s.resources.Storage.EtcdByLog(eventlog.LogID(log)); ok {
		return etcd, nil
	}
	return nil, noLog(log)
}

// noLog is the error for a log that this registry does not have.
func noLog(log string) error {
	return status.Errorf(codes.FailedPrecondition, "this registry has no event log %q (--etcd-servers-overrides)", log)
}

// CurrentRevision returns etcd's revision from a read that began after the call. Concurrent callers share a read.
func (s *Source) CurrentRevision(ctx context.Context, etcd *storage.Etcd) (int64, error) {
	return s.revisions.Get(ctx, string(etcd.Log), etcd.ReadRevision)
}

// Snapshot sends every object of a stored resource at one revision. An object that cannot be decoded is a row with an
// error, because only requests that select the object fail. The call ends early if another caller needs its slot
// (callLimiter).
func (s *Source) Snapshot(r *registryv1.SnapshotRequest,
	stream grpc.ServerStreamingServer[registryv1.SnapshotChunk]) error {
	return rpc.ToStatus(s.snapshots.run(stream.Context(), func(ctx context.Context, slot *callSlot) (err error) {
		defer recovery.ToError("a snapshot", &err)
		return s.snapshot(ctx, r, func(m *registryv1.SnapshotChunk) error {
			return slot.send(ctx, m, stream.SendMsg)
		})
	}))
}

func (s *Source) snapshot(ctx context.Context, r *registryv1.SnapshotRequest,
	send func(*registryv1.SnapshotChunk) error) error {
	etcd, err := s.etcdOf(r.Log)
	if err != nil {
		return err
	}
	if r.KeysOnly && !utilfeature.DefaultFeatureGate.Enabled(features.DetectCacheInconsistency) {
		return status.Error(codes.Unimplemented, "the feature gate DetectCacheInconsistency is off")
	}
	// Read the revision first: a later change of the CRD is then in the log after this revision.
	revision := r.Revision
	if revision == 0 {
		if revision, err = etcd.ReadRevision(ctx); err != nil {
			return err
		}
	}
	st, err := s.resources.StorageResource(ctx, r.StorageResource)
	if err != nil {
		return err
	}
	if st.Etcd != etcd {
		return status.Errorf(codes.FailedPrecondition, "the event log %q does not have %s (--etcd-servers-overrides)",
			r.Log, r.StorageResource)
	}
	if len(r.Sample) > maxSample {
		return status.Errorf(codes.InvalidArgument, "a sample of %d objects; at most %d are allowed", len(r.Sample), maxSample)
	}
	out := &snapshotChunks{send: send, revision: revision}
	if r.KeysOnly {
		return sendKeys(ctx, st, r.Sample, out)
	}
	err = etcd.ReadPages(ctx, st.Prefix, revision, true, func(kvs []*mvccpb.KeyValue) error {
		for len(kvs) > 0 {
			n := batchSize(kvs, rowsBytes, func(kv *mvccpb.KeyValue) int { return len(kv.Value) })
			rows := EncodeRows(ctx, st, kvs[:n])
			for _, row := range rows {
				if err := out.add(row); err != nil {
					return err
				}
			}
			kvs = kvs[len(rows):]
		}
		return nil
	})
	if err != nil {
		return err
	}
	return out.flush()
}

// sendKeys sends rows without objects, but the rows of a sample with them.
func sendKeys(ctx context.Context, st *storage.Resource, sample []string, out *snapshotChunks) error {
	err := st.Etcd.ReadPages(ctx, st.Prefix, out.revision, false, func(kvs []*mvccpb.KeyValue) error {
		for _, kv := range kvs {
			row := &registryv1.Row{Revision: kv.ModRevision}
			if key := string(kv.Key); slices.Contains(sample, key[len(st.Prefix):]) {
				value, err := valueOf(ctx, st.Etcd, kv, out.revision)
				if err != nil {
					return err
				}
				row = st.Row(ctx, key, value, kv.ModRevision)
			}
			row.Namespace, row.Name = st.SplitKey(string(kv.Key))
			if err := out.add(row); err != nil {
				return err
			}
		}
		return out.flush()
	})
	if err != nil {
		return err
	}
	return out.flush()
}

// valueOf returns the value of a key at a revision. It reads etcd only if kv lacks the value.
func valueOf(ctx context.Context, etcd *storage.Etcd, kv *mvccpb.KeyValue, revision int64) ([]byte, error) {
	if len(kv.Value) > 0 {
		return kv.Value, nil
	}
	resp, err := etcd.Client.Client.Get(ctx, string(kv.Key), clientv3.WithRev(revision))
	if err != nil || len(resp.Kvs) == 0 {
		return nil, err
	}
	return resp.Kvs[0].Value, nil
}

// snapshotChunks collects rows into messages.
type snapshotChunks struct {
	send     func(*registryv1.SnapshotChunk) error
	revision int64
	rows     []*registryv1.Row
	bytes    int
	sent     bool
}

func (c *snapshotChunks) add(row *registryv1.Row) error {
	size := len(row.Json) + len(row.Protobuf)
	if len(c.rows) > 0 && c.bytes+size > rowsBytes {
		if err := c.flush(); err != nil {
			return err
		}
	}
	c.rows, c.bytes = append(c.rows, row), c.bytes+size
	return nil
}

// flush sends the collected rows. An empty snapshot is a chunk without rows, which carries the revision.
func (c *snapshotChunks) flush() error {
	if len(c.rows) == 0 && c.sent {
		return nil
	}
	m := &registryv1.SnapshotChunk{Revision: c.revision, Rows: c.rows}
	c.rows, c.bytes, c.sent = nil, 0, true
	return c.send(m)
}

// batchSize returns how many leading items have at most bound bytes together, at least 1.
func batchSize[T any](all []T, bound int, size func(T) int) int {
	n, bytes := 0, 0
	for ; n < len(all); n++ {
		if bytes += size(all[n]); bytes > bound && n > 0 {
			break
		}
	}
	return n
}

// EncodeRows encodes rows on all processors, at least one. It ends when the rows have encodedBytes: defaults of a CRD
// may multiply the bytes of its objects.
func EncodeRows(ctx context.Context, st *storage.Resource, kvs []*mvccpb.KeyValue) []*registryv1.Row {
	rows := make([]*registryv1.Row, len(kvs))
	workers := min(runtime.GOMAXPROCS(0), len(kvs))
	var next, bytes atomic.Int64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for bytes.Load() < encodedBytes {
				i := next.Add(1) - 1
				if i >= int64(len(kvs)) {
					return
				}
				rows[i] = st.Row(ctx, string(kvs[i].Key), kvs[i].Value, kvs[i].ModRevision)
				bytes.Add(int64(len(rows[i].Json) + len(rows[i].Protobuf)))
			}
		})
	}
	wg.Wait()
	return rows[:min(int(next.Load()), len(kvs))] // each worker has encoded the row that it took
}

// encodedBytes is the number of encoded bytes at which EncodeRows ends.
const encodedBytes = 64 << 20

// Encode converts stored encodings into another version, or into Table rows.
func (s *Source) Encode(ctx context.Context, r *registryv1.EncodeRequest) (*registryv1.EncodeResponse, error) {
	if err := s.resources.Custom.RefreshIfOlder(ctx, r.StorageResource, r.CrdRevision); err != nil {
		return nil, rpc.ToStatus(err)
	}
	scope, err := s.resources.RequestScope(ctx, r.Resource)
	if err != nil {
		return nil, rpc.ToStatus(err)
	}
	if scope.APIResource.GetUnstructured() {
		resp, err := conversion.EncodeUnstructured(ctx, scope, r)
		return resp, rpc.ToStatus(err)
	}
	st, ok := s.resources.Storage.ByName(r.StorageResource)
	if !ok {
		return nil, status.Errorf(codes.NotFound, "no stored resource %q", r.StorageResource)
	}
	resp, err := conversion.Encode(ctx, scope, st, r)
	return resp, rpc.ToStatus(err)
}
