// Package streams fills watches: each is a cursor into the events of what it asks for.
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
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/conversion"
	"watershed.dev/services/watchfanout/logreader"
	"watershed.dev/services/watchfanout/query"
)

const (
	// batchEvents is how many events are taken of the ring at a time.
	batchEvents = 256
	// frameBytes is about how many bytes of events or initial events one message gathers. Events of sharedBytes or more
	// are messages of their own, which all streams share. A stream whose client stands still has two messages in
	// memory: gRPC has accepted one, and one waits. They take 64 KB at most beside the bytes that streams share.
	frameBytes  = 32 << 10
	sharedBytes = 4 << 10
	// backfillPiece is what a watch takes of a backfill at a time and holds while its client takes it; smallPiece where
	// all watches together hold piecesBytes.
	backfillPiece = 512 << 10
	smallPiece    = 128 << 10
	piecesBytes   = 128 << 20
)

// Server are the open watches of a replica.
type Server struct {
	// ProgressPeriod is how often a stream is told how far it has come.
	ProgressPeriod time.Duration

	discovery *discovery.Watcher
	cache     *cache.Cache
	logReader *logreader.Reader
	source    registryv1.SourceClient
	converter *conversion.Converter
	delivered *prometheus.CounterVec
	rate      rate
	// pieces is what watches hold of backfills while their clients take it, in bytes.
	pieces   atomic.Int64
	inflight *inflightQuota

	mu       sync.Mutex
	watchers map[*watcher]struct{}
}

// New returns the watches of what a log brings into a cache, served as a catalog says.
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

// Watch streams frames until the caller goes away.
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

// notDiscovered answers a watch of a resource that the replica does not know as the caller does: another replica may,
// and this one soon. One of another history of etcd has expired, and one whose CRD has changed or gone since is over.
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
	storageResource := resource.GetResource() + "." + resource.GetGroup() // as those of CRDs are
	changed := events.Position{Revision: s.cache.Resource(storageResource).CRDChangedAt()}
	if position.Revision > 0 && resource.GetGroup() != "" && position.Before(changed) && isResumed(r) {
		return stream.Send(&watchfanoutv1.WatchFrame{End: true})
	}
	return status.Error(codes.Unavailable, query.ErrNotDiscovered.Error())
}

// watcher is one stream: a cursor into the resource's events.
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
	columnsSent bool // a Table's columns have been sent
	// wanted is the size of the event for which deliver failed with errQuotaExceeded, and granted releases the bytes that have
	// been reserved for it since.
	wanted  int
	granted func()
	// cursor is the cursor's place and sent the last event's revision, for whoever asks how slow the watch is.
	cursor, sentRevision atomic.Int64
}

func (w *watcher) run(ctx context.Context) error {
	cur, err := w.begin(ctx)
	if err != nil {
		return w.sendError(w.endError(err, isResumed(w.request)))
	}
	// the stream is open, and can be resumed from here; not from what has not come yet
	if w.position.Revision <= w.cache.Progress() {
		if err := (&frames{watcher: w, sendPosition: true}).flush(); err != nil {
			return err
		}
	}
	bookmarks := time.NewTicker(w.server.ProgressPeriod)
	defer bookmarks.Stop()
	for bookmarkDue := false; ; { // due: a bookmark, of where the replica is once the events before it are sent
		batch, next, progress, changed, ok := w.events.Next(cur, batchEvents)
		if !ok { // more came at once than memory keeps; the log has it, unless it was reset
			if cur, err = w.resume(ctx, w.position); err != nil {
				return w.sendError(w.endError(err, true))
			}
			continue
		}
		cur = next
		w.cursor.Store(int64(cur))
		switch err := w.deliver(ctx, batch); {
		case errors.Is(err, errQuotaExceeded): // it waits without the events, which may leave the ring meanwhile
			batch = nil
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
		if bookmarkDue && progress >= w.position.Revision { // else it was resumed from what has not come here yet
			bookmarkDue = false
			w.setPosition(progress, events.LastIndex)
			if !w.request.AllowBookmarks { // the gateway alone is told how far the stream has come
				err = (&frames{watcher: w, sendPosition: true}).flush()
			} else {
				err = w.bookmark(progress)
			}
			if err != nil {
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

// setPosition notes that everything up to a position has been sent.
func (w *watcher) setPosition(revision int64, index int32) {
	w.position.Revision, w.position.Index = revision, index
}

// alreadySent says whether the watch's position is at an event or past it.
func (w *watcher) alreadySent(e *cache.Event) bool {
	return e.Revision < w.position.Revision || e.Revision == w.position.Revision && e.Index <= w.position.Index
}

// deliver sends the frames of those events that the query selects. It fails with errQuotaExceeded at a large event that may not
// be in flight yet. The position is then at the event before it.
func (w *watcher) deliver(ctx context.Context, all []*cache.Event) error {
	out := &frames{watcher: w}
	defer out.close()
	for i, e := range all {
		if !w.query.InNamespace(e.Item) || w.alreadySent(e) {
			continue // of another namespace, or seen by the client before this replica had it
		}
		kind, item, err := w.classify(ctx, e)
		if err != nil {
			return err
		}
		if kind == "" {
			continue
		}
		columns := w.columnsSent
		if !w.query.Table && !w.query.Encoding.Partial { // its frame is as large as the object, and is not made before
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

// sendError ends the stream with an ERROR event where the error is the API's own, for the client to see.
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
