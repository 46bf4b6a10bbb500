package watch

import (
	"context"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
)

// begin sends the initial events, if the request needs them, and returns the cursor of the next event.
func (w *watcher) begin(ctx context.Context) (cache.Cursor, error) {
	start, err := events.StartOf(w.request)
	switch {
	case err != nil:
		return 0, err
	case start.Initial:
		return w.initial(ctx, start)
	case start.At.Revision > 0:
		return w.resume(ctx, start.At)
	}
	current, err := w.server.Objects.Current(ctx)
	if err != nil {
		return 0, err
	}
	return w.resume(ctx, events.Position{Revision: current, Index: events.LastIndex})
}

// initial sends every object as ADDED. If the request has sendInitialEvents and allows bookmarks, the
// initial-events-end bookmark follows.
func (w *watcher) initial(ctx context.Context, start events.Start) (cache.Cursor, error) {
	epoch := w.cache.Epoch() // if it changes before resume, the watch ends as expired
	items, revision, err := w.server.Objects.Select(ctx, w.query, start)
	if err != nil {
		return 0, err
	}
	native := conversion.AllNative(w.query, items)
	if items, err = w.filterItems(ctx, items); err != nil {
		return 0, err
	}
	out := &frames{watcher: w}
	if !native {
		err = w.initialEncoded(ctx, items, out)
	} else {
		err = w.initialNative(items, out)
	}
	if err != nil {
		return 0, err
	}
	w.resource.CountInitialEvents(len(items))
	w.setPosition(revision, events.LastIndex)
	out.initialDone = true
	if w.request.SendInitialEvents != nil && w.request.AllowBookmarks {
		if err := out.addInitial(w.query.Bookmark(revision, true)); err != nil {
			return 0, err
		}
	}
	if err := out.flush(); err != nil {
		return 0, err
	}
	return w.resume(ctx, events.Position{Revision: revision, Index: events.LastIndex, Epoch: epoch})
}

// initialNative sends objects in their stored encoding: the stored bytes between the head and the tail of an event.
func (w *watcher) initialNative(items []*cache.Item, out *frames) error {
	head := frame.WatchJSONHead("ADDED", w.query.Encoding.Kind, w.query.Encoding.APIVersion)
	for _, i := range items {
		object := w.query.Stored(i)
		var err error
		switch {
		case w.query.Encoding.Partial || len(object) <= 2 && !w.query.Encoding.Protobuf:
			var data []byte
			if data, err = w.query.Encoding.Event("ADDED", object); err == nil {
				err = out.addInitialPieces(data)
			}
		case w.query.Encoding.Protobuf:
			err = out.addInitialPieces(frame.WatchProtobufHead("ADDED", w.query.Encoding.Kind, w.query.Encoding.APIVersion,
				len(object)), object, frame.TailProtobuf)
		default:
			err = out.addInitialPieces(head, object[1:], frame.WatchJSONTail)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// initialEncoded sends objects that registry encodes. It sends a batch before it encodes the next, so that a client
// that does not read holds a single batch.
func (w *watcher) initialEncoded(ctx context.Context, items []*cache.Item, out *frames) error {
	encode := w.initialConverted
	if w.query.Table {
		encode = w.initialRows
	}
	for len(items) > 0 {
		n := conversion.BatchSize(items)
		if err := encode(ctx, items[:n], out); err != nil {
			return err
		}
		items = items[n:]
	}
	return nil
}

func (w *watcher) initialConverted(ctx context.Context, items []*cache.Item, out *frames) error {
	parts, err := w.converter.Convert(ctx, w.query, items)
	for n := 0; n < len(parts) && err == nil; n++ {
		var data []byte
		if data, err = w.query.Encoding.Event("ADDED", parts[n]); err == nil {
			err = out.addInitial(data)
		}
	}
	return err
}

func (w *watcher) initialRows(ctx context.Context, items []*cache.Item, out *frames) error {
	rows, err := w.converter.Rows(ctx, w.query, items)
	for n := 0; n < len(items) && err == nil; n++ {
		err = out.addInitial(w.row("ADDED", items[n].Revision, rows.JSON(n), rows.Columns))
	}
	return err
}
