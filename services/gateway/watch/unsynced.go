package watch

import (
	"context"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/watchcache/core"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/turns"
)

// runUnsynced forwards a stream of the watch's own, or the shared initial events, until the watch has caught up.
func (w *clientWatch) runUnsynced(ctx context.Context) error {
	turn, ctx := w.hub.Turns.NewTurn(ctx, identity.Owner(w.User))
	defer turn.Yield()
	ctx, cancel := context.WithDeadline(ctx, w.Deadline)
	defer cancel()
	var wg sync.WaitGroup
	leave := func() {}
	defer func() { // leave must not run while Recv does
		cancel()
		wg.Wait()
		leave()
	}()
	wg.Go(func() { // ends the stream early; runJoined selects on these channels itself
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-w.Stopping:
				cancel()
			case <-w.policyChanged:
				if !w.reauthorize(ctx) {
					cancel()
				}
			}
		}
	})
	r := proto.Clone(w.WatchRequest).(*watchfanoutv1.WatchRequest)
	stream, leaveStream, err := w.openStream(ctx, r)
	if err != nil && ctx.Err() != nil {
		return errDone
	}
	if err != nil {
		return err
	}
	leave = leaveStream
	type received struct {
		frame *sharedFrame
		err   error
	}
	first := make(chan received, 1)
	wg.Go(func() {
		m, err := stream.Recv()
		first <- received{m, err}
	})
	var got received
	t := time.NewTimer(headersDelay)
	defer t.Stop()
	select {
	case got = <-first:
	case <-t.C:
		w.sendHeaders() // the client should see at once that its watch is accepted
		got = <-first
	}
	events := newEventMetrics(w.Query)
	for got.err == nil && ctx.Err() == nil {
		if err := w.forward(ctx, got.frame, events, turn); err != nil {
			return err
		}
		got.frame, got.err = stream.Recv()
	}
	if ctx.Err() != nil {
		return errDone
	}
	return got.err
}

// openStream opens the stream of an unsynced watch. It joins the shared initial events if the watch needs initial
// events and the buffer for slow members is less than half full.
func (w *clientWatch) openStream(ctx context.Context, r *watchfanoutv1.WatchRequest) (frameReceiver, func(), error) {
	if w.ResumeAfter == nil && w.place.WantsInitialEvents() &&
		w.hub.bufferedBytes.Load() < w.hub.Config.BroadcastTotalBytes/2 {
		return w.hub.joinInitialEvents(ctx, w.StorageResource, r)
	}
	r.Open = w.headersSent
	stream, err := w.hub.openStream(rpc.WithHashKey(ctx, w.StorageResource), r)
	return unsharedStream{stream}, func() {}, err
}

// frameReceiver is the stream of an unsynced watch.
type frameReceiver interface {
	Recv() (*sharedFrame, error)
}

// sharedFrame is a frame for an unsynced watch. Members of shared initial events have the same frame.
type sharedFrame struct {
	*watchfanoutv1.WatchFrame
	// compressInitial returns the initial events as a part of a gzip body. It compresses them once.
	compressInitial func() *deflate.Part
}

func newSharedFrame(m *watchfanoutv1.WatchFrame) *sharedFrame {
	return &sharedFrame{m, sync.OnceValue(func() *deflate.Part { return deflate.Compress(m.Initial...) })}
}

// unsharedStream is a watch's own stream.
type unsharedStream struct {
	grpc.ServerStreamingClient[watchfanoutv1.WatchFrame]
}

// Recv implements frameReceiver.
func (s unsharedStream) Recv() (*sharedFrame, error) {
	m, err := s.ServerStreamingClient.Recv()
	if err != nil {
		return nil, err
	}
	return newSharedFrame(m), nil
}

// writeInitial sends the initial events of a frame.
func (w *clientWatch) writeInitial(ctx context.Context, m *sharedFrame) error {
	if w.gzip == nil {
		return w.write(ctx, m.Initial...)
	}
	return w.writePart(ctx, m.compressInitial())
}

// forward sends a frame to the client. Long initial events take turns.
func (w *clientWatch) forward(ctx context.Context, m *sharedFrame, events *eventMetrics, turn *turns.Turn) error {
	w.unavailableSince = time.Time{}
	w.sendHeaders()
	if len(m.Initial) > 0 {
		size := int64(0)
		for _, part := range m.Initial {
			size += int64(len(part))
		}
		if w.initialBytes.Add(size) > turns.LongBytes && turn.Take(ctx) != nil {
			return errDone
		}
		if err := w.writeInitial(ctx, m); err != nil {
			return err
		}
		w.usage.add(size)
		events.sentPieces(m.Initial)
	}
	lastBookmark := w.Deadline.Add(-lastBookmarkLead)
	if data := w.place.WithoutEarlyBookmarks(m.WatchFrame, time.Now(), lastBookmark, w.BookmarkPeriod); len(data) > 0 {
		if err := w.write(ctx, data); err != nil {
			return err
		}
		events.sentFrames(data)
		w.usage.add(int64(len(data)))
		if len(m.Initial) == 0 && w.place.Positioned { // flow control accounts for initial events
			w.limiter.charge(core.EventCost(len(m.Boundaries), len(data)))
			if w.limiter.wait(ctx) != nil {
				return errDone
			}
		}
	}
	if m.End {
		turn.Yield()
		w.awaitCRD(ctx, m.CrdChangedAt)
		return io.EOF
	}
	if m.InitialEventsDone && w.InitialEventsEnd != nil {
		w.InitialEventsEnd()
		w.InitialEventsEnd = nil
	}
	if w.place.Sent(m.WatchFrame); w.place.Positioned {
		turn.Yield()
		w.initialized()
	}
	if w.mayJoin() && w.hub.joinable(w.key, w.place.Position()) {
		return errCaughtUp
	}
	return nil
}

// crdTimeout bounds the wait of awaitCRD.
const crdTimeout = 5 * time.Second

// awaitCRD waits until the gateway's discovery has the CRD's change that ended the watch, for crdTimeout at most.
// Otherwise the client could list the resource of a deleted CRD. kube-apiserver also removes a CRD before it ends the
// CRD's watches. changedAt is 0 if no change of a CRD ended the watch.
func (w *clientWatch) awaitCRD(ctx context.Context, changedAt int64) {
	if changedAt == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, crdTimeout)
	defer cancel()
	w.hub.Discovery.AwaitCRD(ctx, w.Query.GetResource(), changedAt)
}
