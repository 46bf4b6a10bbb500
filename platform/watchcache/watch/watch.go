// Package watch serves watches. Each watch is a cursor into the events of the trigger that its query selects. It does
// not encode objects (conversion, query) and does not buffer events: the resource's ring holds them.
//
// The goroutine of each stream owns its watcher. Server's fields are shared, and guarded by mu or atomic.
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

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/logreader"
	"watershed.dev/platform/watchcache/query"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
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

// Server serves a replica's watches.
type Server struct {
	// ProgressPeriod is how often a stream receives the replica's revision.
	ProgressPeriod time.Duration

	discovery *discovery.Watcher
	cache     *cache.Cache
	logReader *logreader.Reader
	source    registryv1.SourceClient
	converter *conversion.Converter
	delivered *prometheus.CounterVec
	rate      rate
	// pieces counts the backfill bytes that watches hold while their clients read.
	pieces   atomic.Int64
	inflight *inflightQuota

	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// New returns a server of watches over c, which l fills. served resolves the watches' resources.
func New(
	progress time.Duration,
	served *discovery.Watcher,
	c *cache.Cache,
	l *logreader.Reader,
	source registryv1.SourceClient,
	converter *conversion.Converter,
) *Server {
	return &Server{
		ProgressPeriod: progress,
		discovery:      served,
		cache:          c,
		logReader:      l,
		source:         source,
		converter:      converter,
		delivered: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_watchfanout_events_delivered_total",
			Help: "Watch events written to streams, by stored resource.",
		}, []string{"resource"}),
		inflight: newInflightQuota(maxInflightBytes),
		watchers: map[*watcher]struct{}{},
	}
}

// Watch streams frames until the caller cancels. It rejects the call if the replica is stale or has not discovered the
// resource.
func (s *Server) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	q, err := query.Resolve(s.discovery.View(), r.Query)
	if errors.Is(err, query.ErrNotDiscovered) {
		return s.notDiscovered(r, stream)
	}
	if err == nil {
		err = s.logReader.CheckFresh()
	}
	if err != nil {
		return rpc.ToStatus(err)
	}
	w := &watcher{
		server:      s,
		cache:       s.cache,
		logReader:   s.logReader,
		converter:   s.converter,
		query:       q,
		request:     r,
		stream:      stream,
		resource:    s.cache.Resource(q.Entry.StorageResource),
		columnsSent: r.ColumnsSent,
	}
	w.events = w.resource.Subscribe(q.Trigger())
	defer w.events.Close()
	defer w.releaseGranted()
	defer s.track(w)()
	return rpc.ToStatus(w.run(stream.Context()))
}

// notDiscovered ends a watch of a resource that is not in the replica's discovery as the caller has it. Usually it
// returns UNAVAILABLE, because another replica may have the resource, and this replica will soon. If the watch's
// position is of another epoch, it sends 410 Expired. If the CRD changed or was deleted after the position, it ends the
// watch.
func (s *Server) notDiscovered(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	position, resource := events.FromProto(r.ResumeAfter), r.GetQuery().GetResource()
	if position.DifferentEpoch(events.Position{Epoch: s.cache.Epoch()}) {
		f := frame.EncodingOf(nil, nil, r.Query.GetOutput().GetMediaType(), false)
		data, err := f.Error(expired(position.Revision, s.cache.Progress()).(apierrors.APIStatus).Status())
		if err != nil {
			return err
		}
		return stream.Send(&watchfanoutv1.WatchFrame{Data: data, End: true})
	}
	storageResource := resource.GetResource() + "." + resource.GetGroup() // as CRDs name it
	changed := events.Position{Revision: s.cache.Resource(storageResource).CRDChangedAt()}
	if position.Revision > 0 && resource.GetGroup() != "" && position.Before(changed) && isResumed(r) {
		return stream.Send(&watchfanoutv1.WatchFrame{End: true})
	}
	return status.Error(codes.Unavailable, query.ErrNotDiscovered.Error())
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
	stream      grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	resource    *cache.Resource
	events      *cache.Subscription
	position    events.Position
	columnsSent bool // whether the client has a Table's columns
	// wanted is the size of the event for which deliver returned errQuotaExceeded. granted releases the bytes that
	// waitForQuota has reserved for it since; nil if there are none.
	wanted  int
	granted func()
	// cursor is the watch's cursor and sentRevision the revision of the last event sent. The status page reads both.
	cursor, sentRevision atomic.Int64
}

func (w *watcher) run(ctx context.Context) error {
	cur, err := w.begin(ctx)
	if err != nil {
		return w.sendError(w.endError(err, isResumed(w.request)))
	}
	// The first message confirms that the stream is open and can resume from its position. It is omitted if the replica
	// has not reached that position.
	if w.position.Revision <= w.cache.Progress() {
		if err := w.flushPosition(); err != nil {
			return err
		}
	}
	bookmarks := time.NewTicker(w.server.ProgressPeriod)
	defer bookmarks.Stop()
	for bookmarkDue := false; ; { // bookmarkDue: send a bookmark once all earlier events are sent
		batch, next, progress, changed, ok := w.events.Next(cur, batchEvents)
		if !ok { // the ring overran the cursor; the log has the events, unless it was reset
			if cur, err = w.resume(ctx, w.position); err != nil {
				return w.sendError(w.endError(err, true))
			}
			continue
		}
		cur = next
		w.cursor.Store(int64(cur))
		switch err := w.deliver(ctx, batch); {
		case errors.Is(err, errQuotaExceeded): // it waits without its events, because the ring may drop them meanwhile
			if err = w.waitForQuota(); err != nil {
				return err
			}
			if cur, err = w.resume(ctx, w.position); err != nil {
				return w.sendError(w.endError(err, true))
			}
			continue
		case err != nil:
			return err
		}
		if progress == 0 {
			continue
		}
		// A watch may have resumed from a revision that this replica has not reached yet.
		if bookmarkDue && progress >= w.position.Revision {
			bookmarkDue = false
			if err := w.sendProgress(progress); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-w.logReader.Draining():
			return rpc.ErrDraining
		case <-bookmarks.C:
			if err := w.logReader.CheckFresh(); err != nil { // another replica may be fresh
				return err
			}
			bookmarkDue = true
		}
	}
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
			err = out.reserve(len(item.JSON))
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
		w.server.delivered.WithLabelValues(w.query.Entry.StorageResource).Inc()
		w.server.rate.count.Add(1)
	}
	return out.flush()
}

// sendError ends the stream with an ERROR event if err is an API error, because the client must receive that. It
// returns every other error.
func (w *watcher) sendError(err error) error {
	if errors.Is(err, errCRDChanged) {
		return w.stream.Send(&watchfanoutv1.WatchFrame{End: true})
	}
	api, ok := err.(apierrors.APIStatus)
	if !ok {
		return err
	}
	data, err := w.query.Encoding.Error(api.Status())
	if err != nil {
		return err
	}
	return w.stream.Send(&watchfanoutv1.WatchFrame{Data: data, End: true})
}
