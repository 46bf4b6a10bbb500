package admission

import (
	"context"
	"sync"
	"time"
)

// budget is what is left of the time that hooks which may be ignored may take of one phase of a request.
type budget struct {
	mu   sync.Mutex
	left time.Duration
}

type budgetKey struct{}

// requestContextKey is the context of who asked for the request that webhooks are called for. Once it is done, whether by a
// timeout that a client chose or because the client has gone, how a call ends says nothing of the webhook.
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

// breakerCall is a call that the breaker let through. trial: it is the one that tries whether the endpoint works again.
type breakerCall struct {
	*endpoint
	options HookOptions
	probe   bool
}

// allow says whether the breaker lets a call through, which then says how it ended: ended or abandon.
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

// abandon: it ended before the endpoint could show whether it works.
func (c breakerCall) abandon() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.probing = c.probing && !c.probe
}

// finish notes whether it succeeded.
func (c breakerCall) finish(success bool) {
	if c.options.Failures == 0 {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
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
