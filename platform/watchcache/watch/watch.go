// Package watch serves watches. Each watch is a cursor into the events of the trigger that its query selects. It does
// not encode objects (conversion, query) and does not buffer events: the resource's ring holds them.
//
// A watch of a call of Watch has a goroutine, which owns its watcher. A watch of a call of Watches has a goroutine only
// while it is not parked (Multiplexer). The call's timer owns a parked watcher while it sends the bookmark. Server's
// fields are shared, and guarded by mu or atomic.
package watch

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

const (
	// batchEvents bounds the events that one read of the ring returns.
	batchEvents = 256
	// frameBytes is about how many bytes of events or initial events one message gathers. An event of sharedBytes or
	// more is a message of its own, whose bytes all streams share. A stream whose client does not read has two messages
	// in memory: gRPC has accepted the first, and the second waits. Beside shared bytes, they take at most 64 KB.
	frameBytes  = 32 << 10
	sharedBytes = 4 << 10
	// backfillPiece bounds the bytes of a backfill that a watch holds while its client reads. smallPiece is the bound
	// while all watches together hold more than piecesBytes.
	backfillPiece = 512 << 10
	smallPiece    = 128 << 10
	piecesBytes   = 128 << 20
)

// Options are the parts and the settings of a Server.
type Options struct {
	Objects   Objects
	Cache     *cache.Cache
	LogReader *logreader.Reader
	Converter *conversion.Converter
	// ProgressPeriod is how often a stream receives the cache's revision.
	ProgressPeriod time.Duration
	// OnlyAdvances makes a stream receive the revision only if it has advanced.
	OnlyAdvances bool
	// ServesStale makes watches begin while the cache is stale. After ProgressPeriod, they end with 410 Expired if the
	// cache is still stale, so that the client lists from etcd. Otherwise they do not begin, and end with UNAVAILABLE,
	// because another process may be fresh.
	ServesStale bool
	// AwaitEpoch, if set, waits until the cache has read the log of etcd's epoch. Watches begin after it. If it fails,
	// only a server that serves stale watches begins them.
	AwaitEpoch func(context.Context) error
}

// Server serves watches.
type Server struct {
	Options

	delivered *prometheus.CounterVec
	rate      rate
	// pieces counts the backfill bytes that watches hold while their clients read.
	pieces   atomic.Int64
	inflight *inflightQuota

	draining  chan struct{}
	drainOnce sync.Once

	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// New returns a server of watches.
func New(o Options) *Server {
	return &Server{
		Options: o,
		delivered: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_watchfanout_events_delivered_total",
			Help: "Watch events written to streams, by stored resource.",
		}, []string{"resource"}),
		inflight: newInflightQuota(maxInflightBytes),
		draining: make(chan struct{}),
		watchers: map[*watcher]struct{}{},
	}
}

// Drain ends every watch with UNAVAILABLE, so that the gateways resume it at another process.
func (s *Server) Drain() { s.drainOnce.Do(func() { close(s.draining) }) }

// mayBegin returns an error if a watch must not begin: the cache is stale, or has events of another epoch.
func (s *Server) mayBegin(ctx context.Context) error {
	if s.AwaitEpoch != nil {
		if err := s.AwaitEpoch(ctx); err != nil && (!s.ServesStale || ctx.Err() != nil) {
			return err
		}
	}
	return s.checkFresh()
}

// checkFresh returns an UNAVAILABLE error if watches must end because the cache is stale.
func (s *Server) checkFresh() error {
	if s.ServesStale {
		return nil
	}
	return s.LogReader.CheckFresh()
}

// Watch streams frames until the caller cancels. It rejects the call if the cache is stale or the resource is not
// discovered.
func (s *Server) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	w, err := s.open(r, stream)
	if err == nil {
		defer w.close()
		err = w.run(stream.Context())
	}
	return endOf(err)
}

// open returns a watch that the caller must close. It returns errEnded if it has sent the watch's end.
func (s *Server) open(r *watchfanoutv1.WatchRequest, stream sender) (*watcher, error) {
	q, err := s.Objects.Resolve(stream.Context(), r.Query)
	if errors.Is(err, query.ErrNotDiscovered) {
		return nil, s.notDiscovered(r, stream)
	}
	if err == nil {
		err = s.mayBegin(stream.Context())
	}
	if err != nil {
		return nil, err
	}
	w := &watcher{
		server:      s,
		cache:       s.Cache,
		logReader:   s.LogReader,
		converter:   s.Converter,
		query:       q,
		request:     r,
		stream:      stream,
		resource:    s.Cache.Resource(q.Entry.StorageResource),
		delivered:   s.delivered.WithLabelValues(q.Entry.StorageResource),
		columnsSent: r.ColumnsSent,
	}
	w.events = w.resource.Subscribe(q.Trigger())
	s.track(w)
	return w, nil
}

// track registers a watch for the status page and metrics.
func (s *Server) track(w *watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.watchers[w] = struct{}{}
}

func (s *Server) untrack(w *watcher) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.watchers, w)
}

// errEnded: the watch has sent its end, and its stream ends without an error.
var errEnded = errors.New("the watch has sent its end")

// endOf returns the status with which a watch's stream ends.
func endOf(err error) error {
	if errors.Is(err, errEnded) {
		return nil
	}
	return rpc.ToStatus(err)
}

// notDiscovered ends a watch of a resource that is not in the replica's discovery as the caller has it. Usually it
// returns UNAVAILABLE, because another replica may have the resource, and this replica will soon. If the watch's
// position is of another epoch, it sends 410 Expired. If the CRD changed or was deleted after the position, it ends the
// watch.
func (s *Server) notDiscovered(r *watchfanoutv1.WatchRequest, stream sender) error {
	position, resource := events.FromProto(r.ResumeAfter), r.GetQuery().GetResource()
	if position.DifferentEpoch(events.Position{Epoch: s.Cache.Epoch()}) {
		f := frame.EncodingOf(nil, nil, r.Query.GetOutput().GetMediaType(), false)
		data, err := f.Error(expired(position.Revision, s.Cache.Progress()).(apierrors.APIStatus).Status())
		if err != nil {
			return err
		}
		return sendEnd(stream, data, 0)
	}
	storageResource := resource.GetResource() + "." + resource.GetGroup() // as CRDs name it
	changed := events.Position{Revision: s.Cache.Resource(storageResource).CRDChangedAt()}
	if position.Revision > 0 && resource.GetGroup() != "" && position.Before(changed) && isResumed(r) {
		return sendEnd(stream, nil, changed.Revision)
	}
	return status.Error(codes.Unavailable, query.ErrNotDiscovered.Error())
}

// sender is the stream of a watch, of a call of Watch or of Watches.
type sender interface {
	// Context ends with the watch.
	Context() context.Context
	Send(*watchfanoutv1.WatchFrame) error
	// SendMsg sends an *rpc.TrackedFrame.
	SendMsg(any) error
}

// sendEnd sends the end of a watch, and returns errEnded. crdChangedAt is the revision of the CRD's change that ends
// the watch, or 0.
func sendEnd(stream sender, data []byte, crdChangedAt int64) error {
	end := &watchfanoutv1.WatchFrame{Data: data, End: true, CrdChangedAt: crdChangedAt}
	if err := stream.Send(end); err != nil {
		return err
	}
	return errEnded
}
