package watch

import (
	"context"
	"time"

	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// eventFrame returns the frame of an event. All watches with the same encoding share it. A frame of a backfill's event
// is built for each watch, because no ring accounts for its bytes.
func (w *watcher) eventFrame(ctx context.Context, e *cache.Event, kind string, item *cache.Item) ([]byte, error) {
	key := w.query.EncodingKey
	key.Event = kind
	if w.query.Table {
		columnsSent := w.columnsSent // watches that have sent the columns share the frame
		w.columnsSent = true
		if !columnsSent {
			key.Event = kind + "+columns"
		}
		return e.Frame(ctx, key, func(ctx context.Context) ([]byte, error) {
			ctx, cancel := context.WithTimeout(ctx, conversion.Timeout)
			defer cancel()
			rows, err := w.converter.Rows(ctx, w.query, []*cache.Item{item})
			if err != nil {
				return nil, err
			}
			if columnsSent {
				rows.Columns = nil
			}
			return w.query.Row(kind, e.Revision, rows.JSON(0), rows.Columns), nil
		})
	}
	return e.Frame(ctx, key, func(ctx context.Context) ([]byte, error) {
		if !w.query.IsNative(item) {
			ctx, cancel := context.WithTimeout(ctx, conversion.Timeout)
			defer cancel()
			parts, err := w.converter.Convert(ctx, w.query, []*cache.Item{item})
			if err != nil {
				return nil, err
			}
			return w.query.Encoding.Event(kind, parts[0])
		}
		return w.query.Encoding.Event(kind, w.query.Stored(item))
	})
}

// row returns an event whose object is a Table of one row. Only the stream's first row includes the columns.
func (w *watcher) row(event string, revision int64, row, columns []byte) []byte {
	if w.columnsSent {
		columns = nil
	}
	w.columnsSent = true
	return w.query.Row(event, revision, row, columns)
}

func (w *watcher) bookmark(revision int64) error {
	out := &frames{watcher: w}
	if err := out.addEvent(w.query.Bookmark(revision, false), true, ""); err != nil {
		return err
	}
	return out.flush()
}

// frames gathers frames into messages.
type frames struct {
	watcher     *watcher
	buf         []byte
	boundaries  []*watchfanoutv1.EventBoundary
	initial     [][]byte
	initialSize int
	initialDone bool
	// tracedSince is when the first event with a trace context was added to the current message.
	tracedSince time.Time
	// sendPosition sends a message with the position even if there are no frames.
	sendPosition bool
	// release releases the bytes that are reserved for the next message; nil if none are.
	release func()
}

// reserve reserves the bytes of an event that has at least sharedBytes. It returns errQuotaExceeded if the event must
// wait. The caller then drops its events, so that a waiting stream holds no bytes.
func (f *frames) reserve(bytes int) error {
	if bytes < sharedBytes {
		return nil
	}
	if err := f.flush(); err != nil {
		return err
	}
	f.close()
	if f.release = f.watcher.tryReserve(bytes); f.release == nil {
		return errQuotaExceeded
	}
	return nil
}

// close releases reserved bytes that were not sent.
func (f *frames) close() {
	if f.release != nil {
		f.release()
		f.release = nil
	}
}

// addInitial adds initial events. They have no position in the log, so they add no boundary.
func (f *frames) addInitial(data []byte) error {
	f.append(data)
	return f.flushIfFull()
}

// addInitialPieces adds an initial event in pieces, without copying them.
func (f *frames) addInitialPieces(all ...[]byte) error {
	f.initial = append(f.initial, all...)
	for _, p := range all {
		f.initialSize += len(p)
	}
	if f.initialSize > frameBytes {
		return f.flush()
	}
	return nil
}

// addEvent adds one event, with the watcher's position as its boundary.
func (f *frames) addEvent(data []byte, bookmark bool, traceparent string) error {
	large := len(data) >= sharedBytes // its bytes are shared, so it is a message of its own
	if large && len(f.buf) > 0 {
		if err := f.flush(); err != nil {
			return err
		}
	}
	if traceparent != "" && f.tracedSince.IsZero() {
		f.tracedSince = time.Now()
	}
	f.append(data)
	f.boundaries = append(f.boundaries, &watchfanoutv1.EventBoundary{
		End:         int32(len(f.buf)),
		Position:    f.watcher.position.Proto(),
		Bookmark:    bookmark,
		Traceparent: traceparent,
	})
	if large {
		return f.flush()
	}
	return f.flushIfFull()
}

func (f *frames) append(data []byte) {
	if f.buf == nil {
		f.buf = data[:len(data):len(data)] // a single frame is sent without a copy, shared with all watchers
	} else {
		f.buf = append(f.buf, data...)
	}
}

func (f *frames) flushIfFull() error {
	if len(f.buf) > frameBytes {
		return f.flush()
	}
	return nil
}

func (f *frames) flush() error {
	if len(f.buf) == 0 && len(f.initial) == 0 && !f.initialDone && !f.sendPosition {
		return nil
	}
	position := f.watcher.position.Proto()
	if n := len(f.boundaries); n > 0 { // the watcher may already be at the next event, which is not in this message
		position = f.boundaries[n-1].Position
	}
	m := &watchfanoutv1.WatchFrame{
		Data:              f.buf,
		InitialEventsDone: f.initialDone,
		Boundaries:        f.boundaries,
		ColumnsSent:       f.watcher.columnsSent,
		Initial:           f.initial,
		Position:          position,
	}
	f.buf, f.boundaries, f.initial, f.initialSize = nil, nil, make([][]byte, 0, len(f.initial)), 0
	err := f.send(m)
	if !f.tracedSince.IsZero() {
		for _, boundary := range m.Boundaries {
			telemetry.RecordEventSpan(boundary.Traceparent, "send", f.tracedSince)
		}
		f.tracedSince = time.Time{}
	}
	return err
}

// send sends a message. A large message without a reservation waits until its owner may have it in flight.
func (f *frames) send(m *watchfanoutv1.WatchFrame) error {
	release := f.release
	f.release = nil
	if n := bytesOf(m); release == nil && n >= sharedBytes {
		var err error
		if release, err = f.watcher.reserve(n); err != nil {
			return err
		}
	}
	if release == nil {
		return f.watcher.stream.Send(m)
	}
	// gRPC drops the unsent messages of a stream that has ended, without calling Done.
	ctx := f.watcher.stream.Context()
	if w, ok := f.watcher.stream.(*multiplexedWatch); ok {
		ctx = w.call.ctx
	}
	stop := context.AfterFunc(ctx, release)
	return f.watcher.stream.SendMsg(&rpc.TrackedFrame{WatchFrame: m, Done: func() { stop(); release() }})
}

func bytesOf(m *watchfanoutv1.WatchFrame) int {
	n := len(m.Data)
	for _, p := range m.Initial {
		n += len(p)
	}
	return n
}
