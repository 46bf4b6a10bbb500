package publisher

import (
	"context"
	"slices"
	"sync"
	"time"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// minObservedEnds and maxObservedEnds are how long a publisher waits for the observed ends of the registries. The
	// servers of NATS may have restarted, and registries may still reconnect. It waits longer than the minimum if no
	// registry has read etcd's fencing token. The last request may take observedEndsTimeout longer.
	minObservedEnds = 500 * time.Millisecond
	maxObservedEnds = 2 * time.Second
	// observedEndsPause is the pause between two requests.
	observedEndsPause = 100 * time.Millisecond
)

// observedEnd is the end of the log that this registry has read.
type observedEnd struct {
	mu  sync.Mutex
	end core.ObservedEnd
}

func (o *observedEnd) get() core.LogEnd {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end.End()
}

// Observe records that this registry has read an event of the log. Events are recorded in the log's order.
func (p *Publisher) Observe(e *logv1.Event) {
	key := ""
	if core.IsChange(e) {
		key = p.keyOf(e)
	}
	p.observed.mu.Lock()
	defer p.observed.mu.Unlock()
	p.observed.end.Observe(e, key)
}

// observedEnds returns the ends of the log that the registries have read. Without an epoch in etcd it returns only this
// registry's end, so that a first start does not wait.
func (p *Publisher) observedEnds(ctx context.Context, record core.Epoch) ([]core.LogEnd, error) {
	if record.ID == "" {
		return []core.LogEnd{p.observed.get()}, nil
	}
	ends := []core.LogEnd{p.observed.get()}
	for began := time.Now(); ; lifecycle.Sleep(ctx, observedEndsPause) {
		round, err := p.Log.ID.ObservedEnds(ctx, p.NATS)
		if err != nil {
			return nil, err
		}
		ends = append(ends, round...)
		hasToken := func(e core.LogEnd) bool { return !e.Empty && e.HasToken(record.Token) }
		waited := time.Since(began)
		if waited > maxObservedEnds || waited > minObservedEnds && slices.ContainsFunc(ends, hasToken) {
			return ends, nil
		}
	}
}
