package admission

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"
)

// hookTransport calls a webhook's endpoint within the limits.
type hookTransport struct {
	hooks *hooks
	next  http.RoundTripper
}

// RoundTrip implements http.RoundTripper. Its errors are failures of the webhook, to which the failurePolicy applies.
func (t *hookTransport) RoundTrip(req *http.Request) (*http.Response, error) {
	e, began := t.hooks.endpointFor(req.URL), time.Now()
	hooksInFlight.WithLabelValues(e.name).Inc()
	defer hooksInFlight.WithLabelValues(e.name).Dec()
	resp, result, err := t.call(req, e)
	e.mu.Lock()
	defer e.mu.Unlock()
	if !e.forgotten {
		hookCalls.WithLabelValues(e.name, result).Inc()
		hookSeconds.WithLabelValues(e.name).Observe(time.Since(began).Seconds())
	}
	return resp, err
}

func (t *hookTransport) call(req *http.Request, e *endpoint) (_ *http.Response, result string, err error) {
	ctx, done, fullBudget := req.Context(), func() {}, true
	b, _ := ctx.Value(budgetKey{}).(*budget)
	if b != nil && (*t.hooks.configured.Load())[e.name] {
		remaining := b.remaining()
		if remaining <= 0 {
			return nil, overBudget, errOverBudget
		}
		fullBudget = remaining == t.hooks.options.Budget
		began := time.Now()
		limited, cancel := context.WithTimeoutCause(ctx, remaining, errOverBudget)
		ctx, done = limited, func() { cancel(); b.spend(time.Since(began)) }
	}
	c, ok := e.allow(t.hooks.options)
	if !ok {
		done()
		return nil, notCalled, errBreakerOpen
	}
	if e.slots != nil {
		select {
		case e.slots <- struct{}{}:
			before := done
			done = func() { before(); <-e.slots }
		case <-ctx.Done():
			done()
			c.abandon()
			return nil, resultOf(req, ctx), context.Cause(ctx)
		}
	}
	// finish records the result of the call.
	finish := func(err error) string {
		defer done()
		if err == nil {
			c.finish(true)
			return succeeded
		}
		result := resultOf(req, ctx)
		if result == canceled || result == overBudget && !fullBudget { // earlier calls have spent the budget
			c.abandon()
		} else {
			c.finish(false)
		}
		return result
	}
	resp, err := t.next.RoundTrip(req.WithContext(ctx))
	if err != nil {
		if result = finish(err); result == overBudget {
			err = errOverBudget
		}
		return nil, result, err
	}
	if resp.StatusCode >= http.StatusInternalServerError {
		resp.Body = &callBody{ReadCloser: resp.Body, finish: func(error) string { return finish(errServer) }}
		return resp, failed, nil
	}
	resp.Body = &callBody{ReadCloser: resp.Body, finish: finish}
	return resp, succeeded, nil
}

// errServer marks a response with a 5xx status, which counts as a failure.
var errServer = errors.New("the server responds with 5xx")

// resultOf returns the reason that a call ended without a response.
func resultOf(req *http.Request, ctx context.Context) string {
	requestCtx, _ := req.Context().Value(requestContextKey{}).(context.Context)
	switch {
	case requestCtx != nil && requestCtx.Err() != nil, errors.Is(req.Context().Err(), context.Canceled):
		return canceled
	case errors.Is(context.Cause(ctx), errOverBudget):
		return overBudget
	}
	return failed
}

// callBody is a response's body. The call ends when it is closed, and succeeds unless reading failed.
type callBody struct {
	io.ReadCloser
	once   sync.Once
	err    error
	finish func(error) string
}

func (l *callBody) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		l.err = err
	}
	return n, err
}

func (l *callBody) Close() error {
	defer l.once.Do(func() { l.finish(l.err) })
	return l.ReadCloser.Close()
}
