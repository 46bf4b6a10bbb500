package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	"k8s.io/apiserver/pkg/server/httplog"

	"watershed.dev/platform/recovery"
)

// withTimeout responds 504 if the handler has not returned before the request's deadline, or aborts a response that has
// started. Long-running requests and requests without RequestInfo have no deadline; the chain produces none of the
// latter. It copies WithTimeoutForNonLongRunningRequests (k8s.io/apiserver/pkg/server/filters/timeout.go). The handler
// runs on another goroutine, because it may outlive the request. The goroutine is reused, because its stack has already
// grown.
//
// A client that leaves ends its request as well. Upstream counts and logs that as a timeout. withTimeout does neither,
// because a client can leave as often as it likes. It counts handlers that continue after either.
func withTimeout(h http.Handler, metricsInfo MetricsInfoFunc) http.Handler {
	pool := &workerPool{}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || LongRunning(req, info) {
			h.ServeHTTP(w, req)
			return
		}
		tw := &timeoutWriter{w: w, header: maps.Clone(w.Header())}
		inner := responsewriter.WrapForHTTP1Or2(tw)
		cloned := cloneRequest(req)
		ended := make(chan any, 1)
		pool.run(func() { ended <- recoverPanic(func() { h.ServeHTTP(inner, cloned) }) })
		select {
		case err := <-ended:
			if err != nil {
				panic(err)
			}
		case <-req.Context().Done():
			httplog.SetStacktracePredicate(req.Context(), func(int) bool { return false })
			if clientGone(req) {
				go afterClientGone(ended)
			} else {
				go afterTimeout(req, time.Now(), ended)
				defer metrics.RecordRequestTermination(req, metricsInfo(info), metrics.APIServerComponent,
					http.StatusGatewayTimeout)
			}
			tw.timeOut()
		}
	})
}

// clientGone reports whether the client has closed its connection or its stream. A deadline ends the context with
// another error.
func clientGone(req *http.Request) bool { return errors.Is(req.Context().Err(), context.Canceled) }

// cloneRequest returns a copy of req for its handler, which changes headers and the URL and may outlive req. Header
// values are shared, because no code changes them.
func cloneRequest(req *http.Request) *http.Request {
	own, url := *req, *req.URL
	own.Header, own.URL = maps.Clone(req.Header), &url
	return &own
}

// recoverPanic runs f and returns its panic value, or nil. It adds the stack unless the panic is http.ErrAbortHandler.
func recoverPanic(f func()) (err any) {
	defer func() {
		err = recover()
		if err != nil && err != http.ErrAbortHandler { //nolint:errorlint // a panic's value, not an error
			err = fmt.Sprintf("%v\n%s", err, debug.Stack())
		}
	}()
	f()
	return nil
}

// afterTimeout waits for a handler whose request timed out, and records its outcome.
func afterTimeout(req *http.Request, since time.Time, ended <-chan any) {
	err := <-ended
	metrics.RecordRequestPostTimeout(metrics.PostTimeoutSourceTimeoutHandler, outcome(err))
	slog.ErrorContext(req.Context(), "A handler returned after its request timed out", "duration", time.Since(since),
		"method", req.Method, "path", req.URL.Path, "aborted", err != nil)
	observePanic("a request after its timeout", err)
}

// observePanic counts and logs a panic of recoverPanic. nil and aborts are none.
func observePanic(operation string, err any) {
	if err != nil && err != http.ErrAbortHandler { //nolint:errorlint // a panic's value, not an error
		recovery.Observe(operation, err)
	}
}

// outcome returns the metric label for a handler's result.
func outcome(err any) string {
	if err != nil {
		return metrics.PostTimeoutHandlerPanic
	}
	return metrics.PostTimeoutHandlerOK
}

// sourceClientLeft is the metric label of handlers that continue after their clients have left.
const sourceClientLeft = "client-left"

// afterClientGone waits for the handler of a request whose client has left, and records its panic unless it is an
// abort.
func afterClientGone(ended <-chan any) {
	err := <-ended
	if err == http.ErrAbortHandler { //nolint:errorlint // a panic's value, not an error
		err = nil
	}
	observePanic("a request after its client disconnected", err)
	metrics.RecordRequestPostTimeout(sourceClientLeft, outcome(err))
}

// maxIdleWorkers is the maximum number of idle goroutines, and workerIdleTimeout how long each stays idle.
const (
	maxIdleWorkers    = 64
	workerIdleTimeout = 500 * time.Millisecond
)

// workerPool reuses goroutines for functions.
type workerPool struct {
	mu   sync.Mutex
	idle []chan func() // a stack: the last worker has the warmest memory
}

// run runs f on another goroutine. f must not panic.
func (p *workerPool) run(f func()) {
	p.mu.Lock()
	n := len(p.idle)
	if n == 0 {
		p.mu.Unlock()
		go p.work(f)
		return
	}
	worker := p.idle[n-1]
	p.idle = p.idle[:n-1]
	p.mu.Unlock()
	worker <- f
}

func (p *workerPool) work(f func()) {
	next := make(chan func(), 1)
	idle := time.NewTimer(workerIdleTimeout)
	defer idle.Stop()
	for {
		f()
		p.mu.Lock()
		if len(p.idle) >= maxIdleWorkers {
			p.mu.Unlock()
			return
		}
		p.idle = append(p.idle, next)
		p.mu.Unlock()
		idle.Reset(workerIdleTimeout)
		select {
		case f = <-next:
		case <-idle.C:
			if p.retire(next) {
				return
			}
			f = <-next
		}
	}
}

// retire removes an idle goroutine. It returns false if a function is already assigned to it.
func (p *workerPool) retire(next chan func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.idle, next)
	if i < 0 {
		return false
	}
	p.idle = slices.Delete(p.idle, i, i+1)
	return true
}

// timeoutWriter is a handler's ResponseWriter. After the deadline it discards output.
//
//	open --- first Write or WriteHeader ---> headersSent.
//	open --- timeOut ---> timedOut: it sends 504.
//	headersSent or hijacked --- timeOut ---> timedOut: it aborts.
type timeoutWriter struct {
	w      http.ResponseWriter
	header http.Header // of the handler

	// state is stateOpen, stateWriting while the handler writes to the client, or stateTimedOut.
	state atomic.Int32

	mu                    sync.Mutex
	headersSent, hijacked bool
}

const (
	stateOpen int32 = iota
	stateWriting
	stateTimedOut
)

func (tw *timeoutWriter) timedOut() bool { return tw.state.Load() == stateTimedOut }

// Unwrap implements responsewriter.UserProvidedDecorator.
func (tw *timeoutWriter) Unwrap() http.ResponseWriter { return tw.w }

// Header implements http.ResponseWriter.
func (tw *timeoutWriter) Header() http.Header {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut() {
		return http.Header{}
	}
	return tw.header
}

// sendHeaders copies the handler's headers to the response. The lock is held.
func (tw *timeoutWriter) sendHeaders() {
	to := tw.w.Header()
	for k, v := range tw.header {
		to[k] = v
	}
	tw.headersSent = true
}

// Write implements http.ResponseWriter.
func (tw *timeoutWriter) Write(p []byte) (int, error) {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.hijacked {
		return 0, http.ErrHijacked
	}
	if !tw.state.CompareAndSwap(stateOpen, stateWriting) {
		return 0, http.ErrHandlerTimeout
	}
	if !tw.headersSent {
		tw.sendHeaders()
	}
	n, err := tw.w.Write(p)
	if !tw.state.CompareAndSwap(stateWriting, stateOpen) && err != nil {
		err = http.ErrHandlerTimeout // timeOut has interrupted the write
	}
	return n, err
}

// WriteHeader implements http.ResponseWriter.
func (tw *timeoutWriter) WriteHeader(code int) {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut() || tw.headersSent || tw.hijacked {
		return
	}
	tw.sendHeaders()
	tw.w.WriteHeader(code)
}

// Flush implements http.Flusher.
func (tw *timeoutWriter) Flush() {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.state.CompareAndSwap(stateOpen, stateWriting) {
		tw.w.(http.Flusher).Flush()
		tw.state.CompareAndSwap(stateWriting, stateOpen)
	}
}

// CloseNotify implements http.CloseNotifier.
func (tw *timeoutWriter) CloseNotify() <-chan bool {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut() {
		closed := make(chan bool)
		close(closed)
		return closed
	}
	return tw.w.(http.CloseNotifier).CloseNotify() //nolint:staticcheck // upstream's wrapper asks for it
}

// Hijack implements http.Hijacker.
func (tw *timeoutWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut() {
		return nil, nil, http.ErrHandlerTimeout
	}
	conn, rw, err := tw.w.(http.Hijacker).Hijack()
	tw.hijacked = tw.hijacked || err == nil
	return conn, rw, err
}

// timeOut responds 504 instead of the handler. If the handler's response has started, it aborts that, so that the
// client sees that it is incomplete. It ends a write that waits for the client: the handler would keep its seat.
func (tw *timeoutWriter) timeOut() {
	if tw.state.Swap(stateTimedOut) == stateWriting {
		_ = http.NewResponseController(tw.w).SetWriteDeadline(time.Now())
	}
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.headersSent || tw.hijacked {
		panic(http.ErrAbortHandler)
	}
	tw.w.WriteHeader(http.StatusGatewayTimeout)
	_ = json.NewEncoder(tw.w).Encode(
		&apierrors.NewTimeoutError("request did not complete within the allotted timeout", 0).ErrStatus)
}
