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
}

// Observe records the next event, as core.ObservedEnd.Observe does.
func (o *ObservedEnd) Observe(e *logv1.Event, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end.Observe(e, key)
}

// End returns the end.
func (o *ObservedEnd) End() core.LogEnd {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end.End()
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
		if proto.Unmarshal(data, e) != nil {
			return
		}
		ends = append(ends, core.LogEnd{
			Last: core.ID{Revision: e.Revision},
			Progress: &logv1.Event{
				Epoch:            e.Epoch,
				FencingToken:     e.FencingToken,
				NextFencingToken: e.NextFencingToken,
			},
			Event: core.EtcdEvent{Key: e.Key, Revision: e.KeyRevision, Deleted: e.Deleted},
		})
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
		data, err := proto.Marshal(&logv1.ObservedEnd{
			Revision:         e.Last.Revision,
			Epoch:            e.Progress.GetEpoch(),
			FencingToken:     e.Progress.GetFencingToken(),
			NextFencingToken: e.Progress.GetNextFencingToken(),
			Key:              e.Event.Key,
			KeyRevision:      e.Event.Revision,
			Deleted:          e.Event.Deleted,
		})
		if err == nil {
			_ = m.Respond(data)
		}
	})
}
