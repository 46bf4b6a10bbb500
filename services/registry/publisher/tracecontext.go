package publisher

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

const (
	// maxTraceContexts and traceContextTTL bound the trace contexts whose events have not arrived.
	maxTraceContexts = 1000
	traceContextTTL  = 10 * time.Second
	// maxOutgoing bounds the trace contexts that wait for NATS, and traceContextTimeout the time that each waits.
	maxOutgoing         = 100
	traceContextTimeout = 100 * time.Millisecond
)

// traceContexts holds the trace contexts of writes whose events have not arrived.
type traceContexts struct {
	count atomic.Int64 // len(byWrite), so that pop needs no lock if it is 0

	once     sync.Once
	outgoing chan *outgoingTraceContext

	mu      sync.Mutex
	byWrite map[writeKey]traceContext
}

// writeKey identifies a write by its etcd key and the mod revision that it replaces.
type writeKey struct {
	key      string
	expected int64
}

type traceContext struct {
	trace      string
	receivedAt time.Time
}

// PublishTraceContext announces a traced write of this registry before the write. If this registry does not publish, it
// sends the trace context to the publisher and waits for that, because the event could arrive first otherwise. It
// blocks for traceContextTimeout at most, also if NATS stalls.
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
	default: // NATS stalls: the event loses its trace
		return
	}
	select {
	case <-t.done:
	case <-timeout.C:
	}
}

// outgoingTraceContext is a trace context for another publisher. done is closed once it is sent or dropped.
type outgoingTraceContext struct {
	*logv1.TraceContext
	done chan struct{}
}

// sendTraceContexts sends queued trace contexts to the publisher until ctx is done.
func (p *Publisher) sendTraceContexts(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case t := <-p.traceContexts.queue():
			publishCtx, cancel := context.WithTimeout(ctx, traceContextTimeout)
			if err := p.Log.ID.PublishTraceContext(publishCtx, p.NATS, t.TraceContext); err != nil {
				slog.Debug("The trace context of a write cannot be published", "error", err)
			}
			cancel()
			close(t.done)
		}
	}
}

// queue returns the channel of trace contexts for another publisher.
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

// pop removes and returns the trace context of the write that an event belongs to, or returns "".
func (c *traceContexts) pop(e *mvccpb.Event) string {
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
	if time.Since(found.receivedAt) > traceContextTTL { // the context is of a failed write over the same revision
		return ""
	}
	return found.trace
}
