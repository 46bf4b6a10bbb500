package watchfanout

import (
	"context"
	"fmt"

	"watershed.dev/platform/frame"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/cache"
)

// eventFrame is made once for all who watch in the same form; of an event in a backfill, once for each watch.
func (w *watcher) eventFrame(ctx context.Context, e *cache.Event, kind string, item *cache.Item) ([]byte, error) {
	key := w.key
	key.event = kind
	if w.table {
		if !w.headers {
			key.event = kind + "+columns"
		}
		data, err := e.Frame(key, func() ([]byte, error) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), encodeTimeout) // others wait for it too
			defer cancel()
			parts, columns, err := w.encoded(ctx, w.query, []*cache.Item{item})
			if err != nil {
				return nil, err
			}
			return w.tableFrame(kind, e.Revision, parts[0], columns), nil
		})
		w.headers = true
		return data, err
	}
	return e.Frame(key, func() ([]byte, error) {
		if !w.own(item) {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), encodeTimeout)
			defer cancel()
			parts, _, err := w.encoded(ctx, w.query, []*cache.Item{item})
			if err != nil {
				return nil, err
			}
			return w.form.Event(kind, parts[0], parts[0])
		}
		return w.form.Event(kind, item.JSON, item.Protobuf)
	})
}

// tableFrame is a Table of one row; the stream's first one names the columns.
func (w *watcher) tableFrame(event string, revision int64, row, columns []byte) []byte {
	if w.headers {
		columns = []byte("null")
	}
	w.headers = true
	table := fmt.Appendf(nil, `{"kind":"Table","apiVersion":%q,"metadata":{"resourceVersion":"%d"},"columnDefinitions":%s,"rows":[%s]}`, frame.APIVersion(w.as), revision, columns, row)
	return frame.WatchJSON(event, table)
}

func (w *watcher) bookmark(revision int64) error {
	out := &frames{watcher: w}
	if err := out.event(w.bookmarkFrame(revision, false), true, ""); err != nil {
		return err
	}
	return out.flush()
}

func (w *watcher) bookmarkFrame(revision int64, initialEnd bool) []byte {
	if !w.table {
		return w.form.Bookmark(revision, initialEnd)
	}
	object := frame.Object(nil, "PartialObjectMetadata", frame.APIVersion(w.as), frame.BookmarkJSON(revision, initialEnd))
	headers := w.headers
	data := w.tableFrame("BOOKMARK", revision, fmt.Appendf(nil, `{"cells":[],"object":%s}`, object), []byte("null"))
	w.headers = headers // the columns are still to be named
	return data
}

// frames gathers frames into messages.
type frames struct {
	*watcher
	buf         []byte
	marks       []*watchfanoutv1.Mark
	initial     [][]byte
	initialSize int
	initialDone bool
	// position: tell the position though there are no frames.
	position bool
}

// add adds initial events, which have no place in the log.
func (f *frames) add(data []byte) error {
	f.append(data)
	return f.flushFull()
}

// pieces adds an initial event in pieces, which are not copied.
func (f *frames) pieces(all ...[]byte) error {
	f.initial = append(f.initial, all...)
	for _, p := range all {
		f.initialSize += len(p)
	}
	if f.initialSize > frameBytes {
		return f.flush()
	}
	return nil
}

// event adds one event, at the watcher's position.
func (f *frames) event(data []byte, bookmark bool, trace string) error {
	f.append(data)
	at := &watchfanoutv1.Position{Revision: f.watcher.position.Revision, Index: f.watcher.position.Index, History: f.watcher.position.History}
	f.marks = append(f.marks, &watchfanoutv1.Mark{End: int32(len(f.buf)), Position: at, Bookmark: bookmark, Trace: trace})
	return f.flushFull()
}

func (f *frames) append(data []byte) {
	if f.buf == nil {
		f.buf = data[:len(data):len(data)] // one frame is sent as it is, shared with every other watcher
	} else {
		f.buf = append(f.buf, data...)
	}
}

func (f *frames) flushFull() error {
	if len(f.buf) > frameBytes {
		return f.flush()
	}
	return nil
}

func (f *frames) flush() error {
	if len(f.buf) == 0 && len(f.initial) == 0 && !f.initialDone && !f.position {
		return nil
	}
	m := &watchfanoutv1.WatchFrame{Data: f.buf, InitialEventsDone: f.initialDone, Marks: f.marks, ColumnsSent: f.headers, Initial: f.initial,
		Position: &watchfanoutv1.Position{Revision: f.watcher.position.Revision, Index: f.watcher.position.Index, History: f.watcher.position.History}}
	f.buf, f.marks, f.initial, f.initialSize = nil, nil, make([][]byte, 0, len(f.initial)), 0
	return f.stream.Send(m)
}
