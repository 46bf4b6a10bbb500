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

func (w *watcher) close() {
	w.server.untrack(w)
	w.releaseGranted()
	w.events.Close()
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
		return sendEnd(stream, data)
	}
	storageResource := resource.GetResource() + "." + resource.GetGroup() // as CRDs name it
	changed := events.Position{Revision: s.Cache.Resource(storageResource).CRDChangedAt()}
	if position.Revision > 0 && resource.GetGroup() != "" && position.Before(changed) && isResumed(r) {
		return sendEnd(stream, nil)
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

// sendEnd sends the end of a watch, and returns errEnded.
func sendEnd(stream sender, data []byte) error {
	if err := stream.Send(&watchfanoutv1.WatchFrame{Data: data, End: true}); err != nil {
		return err
	}
	return errEnded
}

// watcher is one watch stream: a cursor into the resource's events. Its states:
//
//	begin ───── watch from a revision ───────────────► resume
//	begin ───── initial events requested ────────────► initial
//	initial ─── snapshot sent, then its bookmark ────► resume
//	resume ──── position older than the ring ────────► replay
//	replay ──── one backfill piece sent ─────────────► resume
//	resume ──── position in the ring ────────────────► streaming
//	streaming ─ ring overran the cursor ─────────────► resume
//	streaming ─ owner has too many bytes in flight ──► waiting
//	waiting ─── bytes granted ───────────────────────► resume
//	any ─────── canceled, draining, stale, expired ──► ended
//
// A watcher in the state waiting holds no events. A watch whose CRD changed ends without an error.
type watcher struct {
	server    *Server
	cache     *cache.Cache
	logReader *logreader.Reader
	converter *conversion.Converter

	query       *query.Query
	request     *watchfanoutv1.WatchRequest
	stream      sender
	resource    *cache.Resource
	events      *cache.Subscription
	delivered   prometheus.Counter // of the resource
	position    events.Position
	columnsSent bool // whether the client has a Table's columns
	// wanted is the size of the event for which deliver returned errQuotaExceeded. granted releases the bytes that
	// waitForQuota has reserved for it since; nil if there are none.
	wanted  int
	granted func()
	// bookmarkDue: send a bookmark once all earlier events are sent.
	bookmarkDue bool
	// cursor is the watch's cursor and sentRevision the revision of the last event sent. The status page reads both.
	cursor, sentRevision atomic.Int64
}

func (w *watcher) run(ctx context.Context) error {
	if err := w.start(ctx); err != nil {
		return err
	}
	bookmarks := time.NewTicker(w.server.ProgressPeriod)
	defer bookmarks.Stop()
	for {
		changed, advanced, err := w.sendPending(ctx)
		if err != nil {
			return err
		}
		select {
		case <-changed:
		case <-advanced:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-w.server.draining:
			return rpc.ErrDraining
		case <-bookmarks.C:
			if err := w.logReader.CheckFresh(); err != nil && w.server.ServesStale {
				return w.sendError(expired(w.position.Revision, w.cache.Progress()))
			} else if err != nil {
				return err
			}
			w.bookmarkDue = true
		}
	}
}

// start sends the initial events, or the events that the ring has dropped.
func (w *watcher) start(ctx context.Context) error {
	cur, err := w.begin(ctx)
	if err != nil {
		return w.sendError(w.endError(err, isResumed(w.request)))
	}
	w.cursor.Store(int64(cur))
	// The first message confirms that the stream is open and can resume from its position. It is omitted if the replica
	// has not reached that position.
	if w.position.Revision <= w.cache.Progress() {
		return w.flushPosition()
	}
	return nil
}

// sendPending sends all pending events, and a due bookmark. changed is closed when another event arrives. advanced is
// closed when the cache advances, if a bookmark waits for that.
func (w *watcher) sendPending(ctx context.Context) (changed, advanced <-chan struct{}, err error) {
	for {
		advanced = nil
		if w.bookmarkDue {
			advanced = w.cache.Advanced()
		}
		batch, next, progress, changed, ok := w.events.Next(cache.Cursor(w.cursor.Load()), batchEvents)
		if !ok { // the ring overran the cursor; the log has the events, unless it was reset
			if err := w.resumeAgain(ctx); err != nil {
				return nil, nil, err
			}
			continue
		}
		w.cursor.Store(int64(next))
		switch err := w.deliver(ctx, batch); {
		case errors.Is(err, errQuotaExceeded): // it waits without its events, because the ring may drop them meanwhile
			if err = w.waitForQuota(); err == nil {
				err = w.resumeAgain(ctx)
			}
			if err != nil {
				return nil, nil, err
			}
			continue
		case err != nil:
			return nil, nil, err
		}
		if changed == nil { // more events follow
			continue
		}
		if w.bookmarkDue && w.mayReport(progress) {
			w.bookmarkDue, advanced = false, nil
			if err := w.sendProgress(progress); err != nil {
				return nil, nil, err
			}
		}
		return changed, advanced, nil
	}
}

// resumeAgain resumes an open watch after its position.
func (w *watcher) resumeAgain(ctx context.Context) error {
	cur, err := w.resume(ctx, w.position)
	if err != nil {
		return w.sendError(w.endError(err, true))
	}
	w.cursor.Store(int64(cur))
	return nil
}

// mayReport reports whether the watch may send a revision that the cache has reached. The watch may have resumed from a
// later revision.
func (w *watcher) mayReport(progress int64) bool {
	return progress > w.position.Revision || progress == w.position.Revision && !w.server.OnlyAdvances
}

// flushPosition sends the watch's position without an event.
func (w *watcher) flushPosition() error { return (&frames{watcher: w, sendPosition: true}).flush() }

// sendProgress sends the replica's revision: as a bookmark, or as a position for the gateway if the client requested no
// bookmarks.
func (w *watcher) sendProgress(revision int64) error {
	w.setPosition(revision, events.LastIndex)
	if !w.request.AllowBookmarks {
		return w.flushPosition()
	}
	return w.bookmark(revision)
}

// setPosition records that everything up to a position has been sent.
func (w *watcher) setPosition(revision int64, index int32) {
	w.position.Revision, w.position.Index = revision, index
}

// alreadySent reports whether the watch's position is at or after an event.
func (w *watcher) alreadySent(e *cache.Event) bool {
	return e.Revision < w.position.Revision || e.Revision == w.position.Revision && e.Index <= w.position.Index
}

// deliver sends the frames of the events that the query selects. It returns errQuotaExceeded if the owner may not send
// a large event yet. The position is then at the event before it.
func (w *watcher) deliver(ctx context.Context, all []*cache.Event) error {
	out := &frames{watcher: w}
	defer out.close()
	for i, e := range all {
		if !w.query.InNamespace(e.Item) || w.alreadySent(e) {
			continue // in another namespace, or another replica has sent it
		}
		kind, item, err := w.classify(ctx, e)
		if err != nil {
			return err
		}
		if kind == "" {
			continue
		}
		columns := w.columnsSent
		// The frame is as large as the object. deliver reserves its bytes before it builds the frame.
		if !w.query.Table && !w.query.Encoding.Partial {
			err = out.reserve(item.JSONSize())
		}
		var data []byte
		if err == nil {
			data, err = w.eventFrame(ctx, e, kind, item)
		}
		if err == nil && out.release == nil {
			err = out.reserve(len(data))
		}
		if errors.Is(err, errQuotaExceeded) {
			w.columnsSent = columns
			if i > 0 {
				w.advanceTo(all[i-1])
			}
		}
		if err != nil {
			return err
		}
		w.setPosition(e.Revision, e.Index)
		if err := out.addEvent(data, false, e.Traceparent); err != nil {
			return err
		}
		w.sentRevision.Store(e.Revision)
		w.delivered.Inc()
		w.server.rate.count.Add(1)
	}
	return out.flush()
}

// sendError ends the stream with an ERROR event if err is an API error, because the client must receive that. It
// returns every other error.
func (w *watcher) sendError(err error) error {
	if errors.Is(err, errCRDChanged) {
		return sendEnd(w.stream, nil)
	}
	api, ok := err.(apierrors.APIStatus)
	if !ok {
		return err
	}
	data, err := w.query.Encoding.Error(api.Status())
	if err != nil {
		return err
	}
	return sendEnd(w.stream, data)
}
