package internalwatch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/events"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/watchcache"
)

const (
	// bookmarkPeriod is how often a watch sends its position.
	bookmarkPeriod = time.Second
	// messageBytes is about how many bytes of events a message holds.
	messageBytes = 1 << 20
)

// errStalled ends a watch if the event log stalls. Another registry may receive more of it.
var errStalled = status.Error(codes.Unavailable, "the event log does not bring what etcd has")

// Watch streams events of the watch cache. If the cache no longer holds the next event, the watch ends with 410 and the
// client lists.
func (p *InternalWatch) Watch(r *watchfanoutv1.WatchRequest,
	stream grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	v, err := p.view(stream.Context(), r.Query)
	if err == nil && p.cache.Stalled() {
		err = errStalled
	}
	if err != nil {
		return rpc.ToStatus(err)
	}
	w := &watch{
		view:     v,
		cache:    p.cache,
		draining: p.draining,
		request:  r,
		stream:   stream,
	}
	return rpc.ToStatus(w.run(stream.Context()))
}

// watch is an open stream and its position in the log. Its states:
//
//	start ── initial events, or a position in the cache ──▶ streaming
//	start ── another epoch, position too old ──▶ ended with 410
//	streaming ── watchcache.ErrExpired ──▶ ended with 410
//	streaming ── log stalls, registry drains ──▶ ended with Unavailable, resumed at another registry
type watch struct {
	*view
	cache    *watchcache.Cache
	draining <-chan struct{}
	request  *watchfanoutv1.WatchRequest
	stream   grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]
	position events.Position
}

func (w *watch) run(ctx context.Context) error {
	err := w.start(ctx)
	if err == nil {
		err = w.sendEvents(ctx)
	}
	if errors.Is(err, watchcache.ErrExpired) {
		err = apierrors.NewResourceExpired(fmt.Sprintf("too old resource version: %d", w.position.Revision))
	}
	api, ok := err.(apierrors.APIStatus)
	if !ok {
		return err
	}
	data, err := w.form.Error(api.Status()) // the client receives the API error
	if err != nil {
		return err
	}
	return w.stream.Send(&watchfanoutv1.WatchFrame{Data: data, End: true})
}

// start finds the position at which the watch begins, and sends the initial events.
func (w *watch) start(ctx context.Context) error {
	start, err := events.StartOf(w.request)
	if err != nil {
		return err
	}
	revision, epoch := w.cache.Progress()
	if start.At.DifferentEpoch(events.Position{Epoch: epoch}) {
		return watchcache.ErrExpired
	}
	// an unknown epoch is set by the first Next of the watcher
	w.position = events.Position{Index: events.LastIndex, Epoch: cmp.Or(start.At.Epoch, epoch)}
	switch {
	case start.Initial:
		return w.sendInitialEvents(ctx)
	case start.At.Revision == 0: // from the current revision
		w.position.Revision = w.revision
	default:
		w.position.Revision, w.position.Index = start.At.Revision, start.At.Index
	}
	if w.position.Revision > max(revision, w.revision) { // etcd is behind too: it is in another epoch
		return watchcache.ErrExpired
	}
	if w.position.Revision > revision {
		return nil
	}
	return w.send(nil, nil) // the stream is open, and can be resumed from this position
}

// sendInitialEvents sends every selected object as ADDED.
func (w *watch) sendInitialEvents(ctx context.Context) error {
	rows, err := w.readRows(ctx, w.request.ResourceVersion)
	if err != nil {
		return err
	}
	var pieces [][]byte
	bytes := 0
	for _, row := range rows {
		data, err := w.encodeEvent(
			ctx,
			"ADDED",
			&logv1.Object{Json: row.Json, Protobuf: row.Protobuf, Version: row.Version},
		)
		if err != nil {
			return err
		}
		pieces, bytes = append(pieces, data), bytes+len(data)
		if bytes > messageBytes {
			if err := w.stream.Send(&watchfanoutv1.WatchFrame{Initial: pieces}); err != nil {
				return err
			}
			pieces, bytes = nil, 0
		}
	}
	w.position.Revision = w.revision
	if w.request.SendInitialEvents != nil && w.request.AllowBookmarks {
		pieces = append(pieces, w.form.Bookmark(w.revision, true))
	}
	return w.stream.Send(&watchfanoutv1.WatchFrame{
		Initial:           pieces,
		InitialEventsDone: true,
		Position:          w.position.Proto(),
	})
}

// sendEvents sends events, and a position every bookmarkPeriod, until the caller leaves or the watcher ends.
func (w *watch) sendEvents(ctx context.Context) error {
	watcher := w.cache.Watch(w.apiResource.StorageResource, w.position)
	bookmarks := time.NewTicker(bookmarkPeriod)
	defer bookmarks.Stop()
	for due := false; ; {
		batch, progress, changed, overrun := watcher.Next()
		w.position.Epoch = watcher.Epoch()
		if err := w.deliver(ctx, batch); err != nil {
			return err
		}
		if overrun != nil {
			return overrun
		}
		if due && progress > w.position.Revision {
			due = false
			w.position.Revision, w.position.Index = progress, events.LastIndex
			if err := w.sendProgress(); err != nil {
				return err
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-w.draining:
			return rpc.ErrDraining
		case <-bookmarks.C:
			if w.cache.Stalled() {
				return errStalled
			}
			due = true
		}
	}
}

// sendProgress sends the position of the watch: as a bookmark to the client, or without data to the gateway.
func (w *watch) sendProgress() error {
	if !w.request.AllowBookmarks {
		return w.send(nil, nil)
	}
	data := w.form.Bookmark(w.position.Revision, false)
	return w.send(
		data,
		[]*watchfanoutv1.EventBoundary{{Bookmark: true, End: int32(len(data)), Position: w.position.Proto()}},
	)
}

func (w *watch) deliver(ctx context.Context, batch []*logv1.Event) error {
	var data []byte
	var boundaries []*watchfanoutv1.EventBoundary
	for _, e := range batch {
		kind, o := watchcache.Classify(e, w.selector)
		if kind == "" {
			continue
		}
		f, err := w.encodeEvent(ctx, kind, o)
		if err != nil {
			return err
		}
		w.position.Revision, w.position.Index = e.Revision, e.Index
		data = append(data, f...)
		boundaries = append(
			boundaries,
			&watchfanoutv1.EventBoundary{
				End:         int32(len(data)),
				Position:    w.position.Proto(),
				Traceparent: e.Traceparent,
			},
		)
		if len(data) > messageBytes {
			if err := w.send(data, boundaries); err != nil {
				return err
			}
			data, boundaries = nil, nil
		}
	}
	if len(boundaries) == 0 {
		return nil
	}
	return w.send(data, boundaries)
}

// send sends frames that end at the watch's position.
func (w *watch) send(data []byte, boundaries []*watchfanoutv1.EventBoundary) error {
	return w.stream.Send(&watchfanoutv1.WatchFrame{Data: data, Boundaries: boundaries, Position: w.position.Proto()})
}

// encodeEvent returns the frame of an event.
func (v *view) encodeEvent(ctx context.Context, kind string, o *logv1.Object) ([]byte, error) {
	if v.canUseLogEncoding(o.Version) {
		return v.form.Event(kind, o.Json, o.Protobuf)
	}
	r := &registryv1.EncodeRequest{
		StorageResource: v.apiResource.StorageResource,
		Resource:        v.apiResource.Resource,
		Output:          v.output,
		Json:            [][]byte{o.Json},
		Versions:        []string{o.Version},
		CrdRevision:     v.server.cache.CRDRevision(v.apiResource.StorageResource),
	}
	if !v.apiResource.Unstructured {
		r.Protobuf = [][]byte{o.Protobuf}
	}
	resp, err := v.server.source.Encode(ctx, r)
	if err != nil {
		return nil, err
	}
	if len(resp.Objects) != 1 {
		return nil, status.Errorf(codes.Internal, "encode: requested one object, got %d", len(resp.Objects))
	}
	return v.form.Event(kind, resp.Objects[0], resp.Objects[0])
}
