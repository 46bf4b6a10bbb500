package streams

import (
	"context"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	"watershed.dev/services/watchfanout/cache"
)

// begin sends the initial events, if any are due, and says where to go on.
func (w *watcher) begin(ctx context.Context) (cache.Cursor, error) {
	start, err := events.StartOf(w.request)
	switch {
	case err != nil:
	case !start.Initial && start.At.Revision > 0:
		return w.resume(ctx, start.At)
	case start.At.Revision > 0:
		err = w.log.Reach(ctx, start.At.Revision)
	case !start.AnyRevision:
		err = w.log.Current(ctx)
	}
	switch {
	case err != nil:
		return 0, err
	case !start.Initial: // from now on
		return w.resume(ctx, events.Position{Revision: w.cache.Progress(), Index: events.LastIndex})
	}
	return w.initial(ctx)
}

// initial sends every object as ADDED, then a bookmark where initial events were asked for by name.
func (w *watcher) initial(ctx context.Context) (cache.Cursor, error) {
	topic := w.query.Topic()
	history := w.cache.History() // should it change now, the watch does not go on
	snapshot, err := w.resource.Snapshot(ctx, topic.Index(), w.log.Load, w.log.Wait)
	if err != nil {
		return 0, err
	}
	if key, reason, bad := snapshot.Unreadable(w.query.Prefix()); bad && !w.query.SkipUnreadable {
		return 0, apierrors.NewInternalError(fmt.Errorf("unable to transform key %q: %s", key, reason))
	}
	var items []*cache.Item
	own := true
	err = snapshot.Select(ctx, topic, w.query.Prefix(), "", func(i *cache.Item) bool {
		if w.query.MayMatch(i) {
			items = append(items, i)
			own = own && w.query.Own(i)
		}
		return true
	})
	if err != nil {
		return 0, err
	}
	if items, err = w.selected(ctx, items); err != nil {
		return 0, err
	}
	out := &frames{watcher: w}
	if w.query.Table || !own {
		err = w.initialEncoded(ctx, items, out)
	} else {
		err = w.initialNative(items, out)
	}
	if err != nil {
		return 0, err
	}
	w.place(snapshot.Revision, events.LastIndex)
	out.initialDone = true
	if w.request.SendInitialEvents != nil && w.request.AllowBookmarks {
		if err := out.add(w.query.Bookmark(snapshot.Revision, true)); err != nil {
			return 0, err
		}
	}
	if err := out.flush(); err != nil {
		return 0, err
	}
	return w.resume(ctx, events.Position{Revision: snapshot.Revision, Index: events.LastIndex, Epoch: history})
}

// initialNative sends objects as they are stored: their own bytes, with what belongs around them.
func (w *watcher) initialNative(items []*cache.Item, out *frames) error {
	head := frame.WatchJSONHead("ADDED", w.query.Form.Kind, w.query.Form.APIVersion)
	for _, i := range items {
		var err error
		switch {
		case w.query.Form.Partial || len(i.JSON) <= 2:
			var data []byte
			if data, err = w.query.Form.Event("ADDED", i.JSON, i.Protobuf); err == nil {
				err = out.pieces(data)
			}
		case w.query.Form.Protobuf:
			err = out.pieces(frame.WatchProtobufHead("ADDED", w.query.Form.Kind, w.query.Form.APIVersion,
				len(i.Protobuf)), i.Protobuf, frame.TailProtobuf)
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
	if w.query.Table {
		return w.initialRows(ctx, items, out)
	}
	parts, err := w.converter.Converted(ctx, w.query, items)
	for n := 0; n < len(parts) && err == nil; n++ {
		var data []byte
		if data, err = w.query.Form.Event("ADDED", parts[n], parts[n]); err == nil {
			err = out.add(data)
		}
	}
	return err
}

func (w *watcher) initialRows(ctx context.Context, items []*cache.Item, out *frames) error {
	rows, err := w.converter.Rows(ctx, w.query, items)
	for n := 0; n < len(items) && err == nil; n++ {
		err = out.add(w.row("ADDED", items[n].Revision, rows.Append(nil, n), rows.Columns))
	}
	return err
}
