package publisher

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// maxTraceContexts and traceContextTTL bound what is kept of writes whose events have not come.
	maxTraceContexts = 1000
	traceContextTTL  = 10 * time.Second
	// maxOutgoing bounds what waits for NATS, and traceContextTimeout for how long.
	maxOutgoing         = 100
	traceContextTimeout = 100 * time.Millisecond
)

// traceContexts are the traced writes that the publisher was told of and whose events have not come.
type traceContexts struct {
	count atomic.Int64 // how many, for whoever has nothing to ask

	once     sync.Once
	outgoing chan *outgoingTraceContext

	mu      sync.Mutex
	byWrite map[writeKey]traceContext
}

// writeKey is one, by what it is made over.
type writeKey struct {
	key      string
	expected int64
}

type traceContext struct {
	trace      string
	receivedAt time.Time
}

// PublishTraceContext takes note of a write of this registry that is traced, before it is made: for itself, or with whoever publishes.
// It takes traceContextTimeout at most, whatever NATS does.
func (p *Publisher) PublishTraceContext(tc *logv1.TraceContext) {
	if p.publishing.Load() {
		p.traceContexts.add(tc)
		return
	}
	t := &outgoingTraceContext{tc, make(chan struct{})}
	timeout := time.NewTimer(traceContextTimeout)
	defer timeout.Stop()
	select {
	case p.traceContexts.queue() <- t:
	default: // NATS stalls
		return
	}
	select {
	case <-t.done:
	case <-timeout.C:
	}
}

// outgoingTraceContext is a cause that somebody else is to be told of. told is closed once that is done or given up.
type outgoingTraceContext struct {
	*logv1.TraceContext
	done chan struct{}
}

// sendTraceContexts tells whoever publishes, until ctx is done.
func (p *Publisher) sendTraceContexts(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case t := <-p.traceContexts.queue():
			publishCtx, cancel := context.WithTimeout(ctx, traceContextTimeout)
			if err := eventlog.PublishTraceContext(publishCtx, p.NATS, t.TraceContext); err != nil {
				slog.Debug("The publisher is not told of a traced write", "error", err)
			}
			cancel()
			close(t.done)
		}
	}
}

// queue are those that somebody else publishes, and is yet to be told of.
func (c *traceContexts) queue() chan *outgoingTraceContext {
	c.once.Do(func() { c.outgoing = make(chan *outgoingTraceContext, maxOutgoing) })
	return c.outgoing
}

func (c *traceContexts) add(tc *logv1.TraceContext) {
	now := time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.byWrite) >= maxTraceContexts {
		for w, entry := range c.byWrite {
			if now.Sub(entry.receivedAt) > traceContextTTL {
				delete(c.byWrite, w)
			}
		}
	}
	if c.byWrite == nil {
		c.byWrite = map[writeKey]traceContext{}
	}
	if len(c.byWrite) < maxTraceContexts {
		c.byWrite[writeKey{tc.Key, tc.ExpectedRevision}] = traceContext{tc.Traceparent, now}
	}
	c.count.Store(int64(len(c.byWrite)))
}

// pop is the trace that an event belongs to, or empty.
func (c *traceContexts) pop(e *clientv3.Event) string {
	if c.count.Load() == 0 {
		return ""
	}
	w := writeKey{key: string(e.Kv.Key)}
	if e.PrevKv != nil {
		w.expected = e.PrevKv.ModRevision
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	found := c.byWrite[w]
	delete(c.byWrite, w)
	c.count.Store(int64(len(c.byWrite)))
	if time.Since(found.receivedAt) > traceContextTTL { // a write that failed; this is another over the same
		return ""
	}
	return found.trace
}
