package watchfanout

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/frame"
	"watershed.dev/platform/rpc"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

const (
	batchEvents = 256
	frameBytes  = 256 << 10
	// encodeTimeout bounds what registry is asked for on behalf of everyone who watches in one form.
	encodeTimeout = 10 * time.Second
)

// Watch streams frames until the caller goes away.
func (s *Service) Watch(r *watchfanoutv1.WatchRequest, stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	q, err := newQuery(r.Query)
	if err == nil {
		err = s.serving()
	}
	if err != nil {
		return rpc.ToStatus(err)
	}
	w := &watcher{Service: s, query: q, request: r, stream: stream, resource: s.cache.Resource(q.entry.StoredAs), headers: r.ColumnsSent}
	w.events = w.resource.Follow(q.topic())
	defer w.events.Close()
	defer s.open(w)()
	return rpc.ToStatus(w.run(stream.Context()))
}

// watcher is one stream: a cursor into the resource's events.
type watcher struct {
	*Service
	*query
	request  *watchfanoutv1.WatchRequest
	stream   grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	resource *cache.Resource
	events   *cache.Follower
	position watchfanoutv1.Position
	headers  bool // a Table's columns have been sent
	// at is the cursor's place and sent the last event's revision, for whoever asks how slow the watch is.
	at, sent atomic.Int64
}

func (w *watcher) run(ctx context.Context) error {
	cur, err := w.begin(ctx)
	if err != nil {
		return w.fail(w.ended(err, w.resumed()))
	}
	if w.position.Revision <= w.cache.Progress() { // the stream is open, and can be resumed from here; not from what has not come yet
		if err := (&frames{watcher: w, position: true}).flush(); err != nil {
			return err
		}
	}
	bookmarks := time.NewTicker(w.config.ProgressPeriod)
	defer bookmarks.Stop()
	for due := false; ; { // due: a bookmark, of where the replica is once the events before it are sent
		events, next, progress, changed, ok := w.events.Next(cur, batchEvents)
		if !ok { // more came at once than memory keeps; the log has it, unless it was reset
			if cur, err = w.resume(ctx, &watchfanoutv1.Position{Revision: w.position.Revision, Index: w.position.Index, History: w.position.History}); err != nil {
				return w.fail(w.ended(err, true))
			}
			continue
		}
		cur = next
		w.at.Store(int64(cur))
		if err := w.deliver(ctx, events); err != nil {
			return err
		}
		if progress == 0 {
			continue
		}
		if due && progress >= w.position.Revision { // else it was resumed from what has not come here yet
			due = false
			w.place(progress, lastIndex)
			if !w.request.AllowBookmarks { // the gateway alone is told how far the stream has come
				err = (&frames{watcher: w, position: true}).flush()
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
		case <-w.draining:
			return errDraining
		case <-bookmarks.C:
			if err := w.serving(); err != nil { // another replica may be fresh
				return err
			}
			due = true
		}
	}
}

// errDraining ends a watch that another replica goes on with.
var errDraining = status.Error(codes.Unavailable, "the replica is draining")

// lastIndex is past every event of a revision.
const lastIndex = 1<<31 - 1

// begin sends the initial events, if any are due, and says where to go on.
func (w *watcher) begin(ctx context.Context) (cache.Cursor, error) {
	r := w.request
	initial := r.ResourceVersion == "" || r.ResourceVersion == "0"
	if r.SendInitialEvents != nil {
		initial = *r.SendInitialEvents
	}
	if r.ResumeAfter != nil && (!initial || r.InitialEventsDone) {
		return w.resume(ctx, r.ResumeAfter)
	}
	if !initial {
		if r.ResourceVersion == "" || r.ResourceVersion == "0" { // from now on
			if err := w.current(ctx); err != nil {
				return 0, err
			}
			return w.resume(ctx, &watchfanoutv1.Position{Revision: w.cache.Progress(), Index: lastIndex})
		}
		revision, err := strconv.ParseInt(r.ResourceVersion, 10, 64)
		if err != nil {
			return 0, apierrors.NewBadRequest("invalid resource version: " + r.ResourceVersion)
		}
		return w.resume(ctx, &watchfanoutv1.Position{Revision: revision, Index: lastIndex})
	}
	switch r.ResourceVersion {
	case "0":
	case "":
		if err := w.current(ctx); err != nil {
			return 0, err
		}
	default:
		revision, err := strconv.ParseInt(r.ResourceVersion, 10, 64)
		if err != nil {
			return 0, apierrors.NewBadRequest("invalid resource version: " + r.ResourceVersion)
		}
		if err := w.reach(ctx, revision); err != nil {
			return 0, err
		}
	}
	return w.initial(ctx)
}

// place notes that everything up to a position has been sent.
func (w *watcher) place(revision int64, index int32) {
	w.position.Revision, w.position.Index = revision, index
}

// resume goes on after a position, once the replica has come as far.
func (w *watcher) resume(ctx context.Context, at *watchfanoutv1.Position) (cache.Cursor, error) {
	w.place(at.Revision, at.Index)
	if w.position.History = at.History; at.History == "" {
		w.position.History = w.cache.History()
		if err := w.known(ctx, at.Revision); err != nil {
			return 0, err
		}
	}
	for {
		cur, low, ok := w.events.After(w.position.Revision, w.position.Index)
		if h := w.cache.History(); h != "" && w.position.History != "" && h != w.position.History {
			return 0, expired(w.position.Revision, low)
		}
		if ok {
			return cur, nil
		}
		if err := (&frames{watcher: w, position: true}).flush(); err != nil {
			return cur, err
		}
		if err := w.replay(ctx, low); err != nil {
			return cur, err
		}
	}
}

// known refuses a revision that etcd has not come to: a client has it from another history, of before a backup was
// restored, and would wait for what it believes to have seen.
func (w *watcher) known(ctx context.Context, revision int64) error {
	if revision <= w.cache.Progress() {
		return nil
	}
	r, err := w.registry.Revision(ctx, &registryv1.RevisionRequest{})
	if err != nil { // nobody can say; it waits
		return nil
	}
	if revision > r.Revision {
		return expired(revision, w.cache.Progress())
	}
	return nil
}

// replay sends events that memory no longer holds, from the log: as many as a backfill has.
func (w *watcher) replay(ctx context.Context, low int64) error {
	after := w.position.Revision
	if w.position.Index != lastIndex {
		after-- // its transaction holds more; what was sent of it is left out
	}
	began := time.Now()
	b, leave, err := w.backfill(ctx, w.entry.StoredAs, after, low)
	slog.Debug("Replayed from the log", "resource", w.entry.StoredAs, "after", after, "took", time.Since(began), "error", err)
	switch {
	case err != nil && ctx.Err() != nil:
		return status.FromContextError(ctx.Err()).Err()
	case errors.Is(err, errDraining):
		return err
	case err != nil: // forgotten, or nobody could say for as long as backfillTimeout: a list is the way to go on
		return expired(w.position.Revision, low)
	}
	bound := backfillPiece
	if w.pieces.Load() > piecesBytes {
		bound = smallPiece
	}
	events, bytes, whole := w.piece(b.events, bound)
	w.pieces.Add(int64(bytes))
	defer w.pieces.Add(-int64(bytes))
	upTo := b.upTo
	leave() // before anything is sent: a client that takes little holds a piece, and no backfill
	for len(events) > 0 {
		select {
		case <-w.draining:
			return errDraining
		default:
		}
		n := min(len(events), batchEvents)
		if err := w.deliver(ctx, events[:n]); err != nil {
			return err
		}
		w.past(events[n-1])
		events = events[n:]
	}
	if !whole {
		return nil // at its place, from where it goes on with the next piece
	}
	if upTo <= after {
		return expired(w.position.Revision, low)
	}
	if upTo > w.position.Revision || upTo == w.position.Revision && w.position.Index < lastIndex {
		w.place(upTo, lastIndex)
	}
	return nil
}

// past notes that everything up to an event has been sent, or is not of the query.
func (w *watcher) past(e *cache.Event) {
	if e.Revision > w.position.Revision || e.Revision == w.position.Revision && e.Index > w.position.Index {
		w.place(e.Revision, e.Index)
	}
}

// piece is the next of a backfill's events that a watch sends at a time: one at least, and bound bytes at most beyond it. whole says that
// they are all.
func (w *watcher) piece(all []*cache.Event, bound int) (events []*cache.Event, bytes int, whole bool) {
	for len(all) > 0 && (all[0].Revision < w.position.Revision || all[0].Revision == w.position.Revision && all[0].Index <= w.position.Index) {
		all = all[1:]
	}
	n := 0
	for ; n < len(all); n++ {
		size := all[n].Size()
		if n > 0 && bytes+size > bound {
			break
		}
		bytes += size
	}
	return slices.Clone(all[:n]), bytes, n == len(all) // a copy, which holds nothing else
}

// expired is kube-apiserver's answer to a watch from a revision that is no longer known.
func expired(revision, low int64) error {
	return apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d (%d)", revision, low))
}

// errRedefined ends a watch of a resource whose definition has changed: objects are read in another way, and clients
// begin anew.
var errRedefined = errors.New("the resource was defined anew")

// resumed says whether the client has been told something already: the gateway names a place also for a watch that only
// begins at a revision.
func (w *watcher) resumed() bool {
	at := w.request.ResumeAfter
	return at != nil && (at.Index != lastIndex || strconv.FormatInt(at.Revision, 10) != w.request.ResourceVersion)
}

// ended is why a watch cannot go on. One that was open when its resource was redefined ends without an error, as
// kube-apiserver's do.
func (w *watcher) ended(err error, open bool) error {
	if open && apierrors.IsResourceExpired(err) && w.resource.Redefined() >= w.position.Revision {
		return errRedefined
	}
	return err
}

// initial sends every object as ADDED, then a bookmark where initial events were asked for by name.
func (w *watcher) initial(ctx context.Context) (cache.Cursor, error) {
	topic := w.topic()
	history := w.cache.History() // should it change now, the watch does not go on
	snapshot, err := w.resource.Snapshot(ctx, topic.Index(), w.source, w.wait)
	if err != nil {
		return 0, err
	}
	if key, reason, bad := snapshot.Unreadable(w.prefix()); bad && !w.skips {
		return 0, apierrors.NewInternalError(fmt.Errorf("unable to transform key %q: %s", key, reason))
	}
	var items []*cache.Item
	own := true
	snapshot.ScanField(topic, w.prefix(), "", func(i *cache.Item) bool {
		if w.mayMatch(i) {
			items = append(items, i)
			own = own && w.own(i)
		}
		return true
	})
	if items, err = w.selected(ctx, items); err != nil {
		return 0, err
	}
	out := &frames{watcher: w}
	if w.table || !own {
		err = w.initialEncoded(ctx, items, out)
	} else {
		err = w.initialNative(items, out)
	}
	if err != nil {
		return 0, err
	}
	w.place(snapshot.Revision, lastIndex)
	out.initialDone = true
	if w.request.SendInitialEvents != nil && w.request.AllowBookmarks {
		if err := out.add(w.bookmarkFrame(snapshot.Revision, true)); err != nil {
			return 0, err
		}
	}
	if err := out.flush(); err != nil {
		return 0, err
	}
	return w.resume(ctx, &watchfanoutv1.Position{Revision: snapshot.Revision, Index: lastIndex, History: history})
}

// initialNative sends objects as they are stored: their own bytes, with what belongs around them.
func (w *watcher) initialNative(items []*cache.Item, out *frames) error {
	head := frame.WatchJSONHead("ADDED", w.form.Kind, w.form.APIVersion)
	for _, i := range items {
		var err error
		switch {
		case w.form.Partial || len(i.JSON) <= 2:
			var data []byte
			if data, err = w.form.Event("ADDED", i.JSON, i.Protobuf); err == nil {
				err = out.pieces(data)
			}
		case w.form.Protobuf:
			err = out.pieces(frame.WatchProtobufHead("ADDED", w.form.Kind, w.form.APIVersion, len(i.Protobuf)), i.Protobuf, frame.TailProtobuf)
		default:
			err = out.pieces(head, i.JSON[1:], frame.WatchJSONTail)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) initialEncoded(ctx context.Context, items []*cache.Item, out *frames) error {
	parts, columns, err := w.encoded(ctx, w.query, items)
	if err != nil {
		return err
	}
	for n, i := range items {
		var data []byte
		if w.table {
			data = w.tableFrame("ADDED", i.Revision, parts[n], columns)
		} else if data, err = w.form.Event("ADDED", parts[n], parts[n]); err != nil {
			return err
		}
		if err := out.add(data); err != nil {
			return err
		}
	}
	return nil
}

// deliver sends the frames of those events that the query selects.
func (w *watcher) deliver(ctx context.Context, events []*cache.Event) error {
	out := &frames{watcher: w}
	for _, e := range events {
		if !w.inScope(e.Item) || e.Revision < w.position.Revision || e.Revision == w.position.Revision && e.Index <= w.position.Index {
			continue // of another namespace, or seen by the client before this replica had it
		}
		kind, item, err := w.seen(ctx, e)
		if err != nil {
			return err
		}
		if kind == "" {
			continue
		}
		data, err := w.eventFrame(ctx, e, kind, item)
		if err != nil {
			return err
		}
		w.place(e.Revision, e.Index)
		if err := out.event(data, false, e.Trace); err != nil {
			return err
		}
		w.sent.Store(e.Revision)
		w.metrics.delivered.WithLabelValues(w.entry.StoredAs).Inc()
		w.rate.count.Add(1)
	}
	return out.flush()
}

// fail ends the stream with an ERROR event where the error is the API's own, for the client to see.
func (w *watcher) fail(err error) error {
	if errors.Is(err, errRedefined) {
		return w.stream.Send(&watchfanoutv1.WatchFrame{End: true})
	}
	api, ok := err.(apierrors.APIStatus)
	if !ok {
		return err
	}
	data, err := w.form.Error(api.Status())
	if err != nil {
		return err
	}
	return w.stream.Send(&watchfanoutv1.WatchFrame{Data: data, End: true})
}
