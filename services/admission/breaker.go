package admission

import (
	"context"
	"sync"
	"time"
)

// budget is the remaining time that webhooks with failurePolicy Ignore may take in one phase of a request.
type budget struct {
	mu   sync.Mutex
	left time.Duration
}

type budgetKey struct{}

// requestContextKey is the context key of the reviewed request's context. Once that context is done, the result of a
// webhook call does not count for or against the webhook. The client may have set a timeout or disconnected.
type requestContextKey struct{}

// withBudget gives a phase of a request its budget.
func (h *hooks) withBudget(ctx context.Context) context.Context {
	if h == nil {
		return ctx
	}
	ctx = context.WithValue(ctx, requestContextKey{}, ctx)
	if h.options.Budget == 0 {
		return ctx
	}
	return context.WithValue(ctx, budgetKey{}, &budget{left: h.options.Budget})
}

func (b *budget) remaining() time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.left
}

func (b *budget) spend(d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left -= d
}

// breakerCall is a call that the breaker admitted. probe marks the call that checks whether the endpoint works again.
type breakerCall struct {
	*endpoint
	options HookOptions
	probe   bool
}

// allow reports whether the breaker admits a call. The caller then calls finish or abandon.
func (e *endpoint) allow(o HookOptions) (breakerCall, bool) {
	c := breakerCall{endpoint: e, options: o}
	if o.Failures == 0 {
		return c, true
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	switch {
	case e.failures < o.Failures:
		return c, true
	case time.Now().Before(e.until) || e.probing:
		return c, false
	}
	e.probing, c.probe = true, true
	return c, true
}

// abandon ends a call that shows nothing about the endpoint.
func (c breakerCall) abandon() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.probing = c.probing && !c.probe
}

// finish records whether the call succeeded.
func (c breakerCall) finish(success bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.failing = !success; c.failing {
		c.failedAt = time.Now()
	}
	if c.options.Failures == 0 || c.forgotten {
		return
	}
	c.probing = c.probing && !c.probe
	if success {
		c.failures = 0
		breakersOpen.WithLabelValues(c.name).Set(0)
		return
	}
	if c.failures++; c.failures >= c.options.Failures {
		c.until = time.Now().Add(c.options.Pause)
		breakersOpen.WithLabelValues(c.name).Set(1)
	}
}
