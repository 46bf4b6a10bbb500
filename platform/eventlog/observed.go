package eventlog

import (
	"context"
	"slices"
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
	// earlier is the end that an earlier process has kept in the file, until Replace.
	earlier core.LogEnd
	// file keeps the end from Replace on. Nil: no file keeps it.
	file     *endFile
	replaced bool
}

// Keep reads the end that an earlier process has kept in the file at path. A single process uses the file until it
// exits. Keep is called before the other methods. It returns an error if it cannot create, lock, write or map the file.
func (o *ObservedEnd) Keep(path string) error {
	file, err := openEndFile(path)
	if err != nil {
		return err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.file, o.earlier = file, file.end(time.Now())
	return nil
}

// Replace replaces the earlier process's end with this process's, also in the file, now and with each later event. This
// process has read the log of etcd's epoch to its end.
func (o *ObservedEnd) Replace() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.earlier, o.replaced = core.LogEnd{Empty: true}, true
	o.write()
}

func (o *ObservedEnd) write() {
	if o.file != nil && o.replaced {
		o.file.write(o.end.End())
	}
}

// Observe records the next event, as core.ObservedEnd.Observe does.
func (o *ObservedEnd) Observe(e *logv1.Event, key string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.end.Observe(e, key)
	o.write()
}

// End returns the end that this process has read.
func (o *ObservedEnd) End() core.LogEnd {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end.End()
}

// Ends returns the ends that this process has read and that an earlier process has kept, unless they are empty.
func (o *ObservedEnd) Ends() []core.LogEnd {
	o.mu.Lock()
	defer o.mu.Unlock()
	ends := []core.LogEnd{o.end.End()}
	if o.file != nil {
		ends = append(ends, o.earlier)
	}
	return slices.DeleteFunc(ends, func(e core.LogEnd) bool { return e.Empty })
}

// observedEndsTimeout is how long ObservedEnds waits for responses. The number of registries is unknown.
const observedEndsTimeout = 250 * time.Millisecond

// maxObservedEnds bounds the responses that ObservedEnds reads.
const maxObservedEnds = 100

// ObservedEnds returns the ends of the log that the registries have read or kept, also this registry's. It waits for
// observedEndsTimeout, unless no registry responds.
func (l LogID) ObservedEnds(ctx context.Context, nc *nats.Conn) (ends []core.LogEnd, err error) {
	const timeout = observedEndsTimeout
	err = gather(ctx, nc, l.Subject(endRequestSubject), timeout, timeout, maxObservedEnds, func(data []byte) {
		e := &logv1.ObservedEnd{}
		if proto.Unmarshal(data, e) == nil {
			ends = append(ends, endIn(e))
		}
	})
	return ends, err
}

// ServeObservedEnds responds to ObservedEnds with a message for each of the ends.
func (l LogID) ServeObservedEnds(nc *nats.Conn, ends func() []core.LogEnd) (*nats.Subscription, error) {
	return nc.Subscribe(l.Subject(endRequestSubject), func(m *nats.Msg) {
		for _, end := range ends() {
			if data, err := proto.Marshal(setEnd(&logv1.ObservedEnd{}, end)); err == nil {
				_ = m.Respond(data)
			}
		}
	})
}

// endIn returns the end in a message.
func endIn(e *logv1.ObservedEnd) core.LogEnd {
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

// setEnd replaces the end in a message, and returns the message.
func setEnd(e *logv1.ObservedEnd, end core.LogEnd) *logv1.ObservedEnd {
	e.Revision = end.Last.Revision
	e.Epoch = end.Progress.GetEpoch()
	e.FencingToken, e.NextFencingToken = end.Progress.GetFencingToken(), end.Progress.GetNextFencingToken()
	e.Key, e.KeyRevision, e.Deleted = end.Event.Key, end.Event.Revision, end.Event.Deleted
	return e
}
