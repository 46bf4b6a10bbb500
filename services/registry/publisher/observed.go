package publisher

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// observersTimeout is how long a publisher waits for a registry that has read the log of etcd's epoch. The servers
	// of NATS may have restarted, and registries may still reconnect.
	observersTimeout = 2 * time.Second
	// observersPause is the pause between two requests.
	observersPause = 100 * time.Millisecond
)

// observed is the end of the log that this registry has read.
type observed struct {
	mu       sync.Mutex
	observer core.Observer
	// serve is done once the registry responds to publishers, after its first message with a fencing token.
	serve sync.Once
}

func (o *observed) end() core.LogEnd {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.observer.End()
}

// Observe records that this registry has read an event of the log. Events are recorded in the log's order.
func (p *Publisher) Observe(e *logv1.Event) {
	key := ""
	if core.IsChange(e) {
		key = p.keyOf(e)
	}
	p.observed.mu.Lock()
	p.observed.observer.Observe(e, key)
	p.observed.mu.Unlock()
	if e.FencingToken != "" {
		p.observed.serve.Do(func() {
			if _, err := p.Log.ID.ServeObservedEnd(p.NATS, p.observed.end); err != nil {
				slog.Warn("This registry cannot tell publishers how far it has read the event log", "error", err)
			}
		})
	}
}

// observedEnds returns the ends of the log that the registries have read. If etcd has an epoch, it waits for
// observersTimeout until a registry has read the log of this epoch.
func (p *Publisher) observedEnds(ctx context.Context, epoch core.Epoch) ([]core.LogEnd, error) {
	for began := time.Now(); ; lifecycle.Sleep(ctx, observersPause) {
		ends, err := p.Log.ID.ObservedEnds(ctx, p.NATS)
		if err != nil {
			return nil, err
		}
		ends = append(ends, p.observed.end())
		ofEpoch := func(e core.LogEnd) bool { return e.Progress.GetEpoch() == epoch.ID }
		if epoch.ID == "" || slices.ContainsFunc(ends, ofEpoch) || time.Since(began) > observersTimeout {
			return ends, ctx.Err()
		}
	}
}
