package eventlog

import (
	"context"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ObservedEnd is a core.ObservedEnd for concurrent use: a reader of the log moves it, and publishers request it.
type ObservedEnd struct {
	mu  sync.Mutex
	end core.ObservedEnd
	// kept is the end that this process and earlier processes with the same file have read. Unused without a file.
	kept core.ObservedEnd
	file *endFile
}

// Keep keeps the end in a file, and continues from the end that an earlier process has kept there. Observe has not been
// called yet. The directory of the file is created.
func (o *ObservedEnd) Keep(path string) error {
	file, end, err := openEndFile(path)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.file, o.kept = file, core.ObservedEndAt(end)
	return nil
}

// Observe records the next event, as core.ObservedEnd.Observe does.
func (o *ObservedEnd) Observe(e *logv1.Event, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end.Observe(e, key)
	if o.file != nil {
		o.kept.Observe(e, key)
		o.file.write(o.kept.End())
	}
}

// End returns the end that this process has read.
func (o *ObservedEnd) End() core.LogEnd {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end.End()
}

// Kept returns the end that this process or an earlier process with the same file has read.
func (o *ObservedEnd) Kept() core.LogEnd {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.file == nil {
		return o.end.End()
	}
	return o.kept.End()
}

// observedEndsTimeout is how long ObservedEnds waits for responses. The number of registries is unknown.
const observedEndsTimeout = 250 * time.Millisecond

// maxObservedEnds bounds the responses that ObservedEnds reads.
const maxObservedEnds = 100

// ObservedEnds returns the ends of the log that the registries have read, also this registry's. It waits for
// observedEndsTimeout, unless no registry responds.
func (l LogID) ObservedEnds(ctx context.Context, nc *nats.Conn) (ends []core.LogEnd, err error) {
	const timeout = observedEndsTimeout
	err = gather(ctx, nc, l.Subject(endRequestSubject), timeout, timeout, maxObservedEnds, func(data []byte) {
		e := &logv1.ObservedEnd{}
		if proto.Unmarshal(data, e) == nil {
			ends = append(ends, decodeEnd(e))
		}
	})
	return ends, err
}

// ServeObservedEnd responds to ObservedEnds with the result of end, unless it is empty.
func (l LogID) ServeObservedEnd(nc *nats.Conn, end func() core.LogEnd) (*nats.Subscription, error) {
	return nc.Subscribe(l.Subject(endRequestSubject), func(m *nats.Msg) {
		e := end()
		if e.Empty {
			return
		}
		if data, err := proto.Marshal(encodeEnd(&logv1.ObservedEnd{}, e)); err == nil {
			_ = m.Respond(data)
		}
	})
}

func decodeEnd(e *logv1.ObservedEnd) core.LogEnd {
	return core.LogEnd{
		Last: core.ID{Revision: e.Revision},
		Progress: &logv1.Event{
			Epoch:            e.Epoch,
			FencingToken:     e.FencingToken,
			NextFencingToken: e.NextFencingToken,
		},
		Event: core.EtcdEvent{Key: e.Key, Revision: e.KeyRevision, Deleted: e.Deleted},
	}
}

func encodeEnd(e *logv1.ObservedEnd, end core.LogEnd) *logv1.ObservedEnd {
	e.Revision = end.Last.Revision
	e.Epoch = end.Progress.GetEpoch()
	e.FencingToken, e.NextFencingToken = end.Progress.GetFencingToken(), end.Progress.GetNextFencingToken()
	e.Key, e.KeyRevision, e.Deleted = end.Event.Key, end.Event.Revision, end.Event.Deleted
	return e
}
