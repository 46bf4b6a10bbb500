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
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	"k8s.io/apiserver/pkg/server/httplog"
)

// withTimeout answers 504 in place of a handler that is not done when the request's time is over, or ends the answer that it
// has begun; long-running requests have no time (k8s.io/apiserver/pkg/server/filters/timeout.go,
// WithTimeoutForNonLongRunningRequests). One without RequestInfo, which the chain does not let happen, has no time. The
// handler runs on another goroutine, since it may go on: on one that has run
// handlers before, whose stack has grown to what they need.
//
// A client that leaves ends its request as well. Upstream counts and logs that as a timeout. timely does neither,
// because a client can leave as often as it likes. It counts handlers that go on after either.
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
				go afterClientGone(req, ended)
			} else {
				go afterTimeout(req, time.Now(), ended)
				defer metrics.RecordRequestTermination(req, metricsInfo(info), metrics.APIServerComponent,
					http.StatusGatewayTimeout)
			}
			tw.timeOut()
		}
	})
}

// clientGone reports whether the request's client has closed its connection or its stream. The deadline of a request ends its
// context with another error.
func clientGone(req *http.Request) bool { return errors.Is(req.Context().Err(), context.Canceled) }

// cloneRequest is a handler's own request: it changes its headers and its URL, and may outlive the one that it was made of.
// What the headers' values are, nobody changes.
func cloneRequest(req *http.Request) *http.Request {
	own, url := *req, *req.URL
	own.Header, own.URL = maps.Clone(req.Header), &url
	return &own
}

// recoverPanic is what f panics with, with its stack where that is worth telling, or nil.
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

// afterTimeout waits for a handler that nobody waits for any more.
func afterTimeout(req *http.Request, since time.Time, ended <-chan any) {
	err := <-ended
	metrics.RecordRequestPostTimeout(metrics.PostTimeoutSourceTimeoutHandler, outcome(err))
	slog.ErrorContext(req.Context(), "A request went on after its time", "for", time.Since(since), "method", req.Method,
		"path", req.URL.Path, "panic", err)
}

// outcome is the metric's label of how a handler ended.
func outcome(err any) string {
	if err != nil {
		return metrics.PostTimeoutHandlerPanic
	}
	return metrics.PostTimeoutHandlerOK
}

// sourceClientLeft is the metric's label of handlers that go on after their clients have left.
const sourceClientLeft = "client-left"

// afterClientGone waits for the handler of a request whose client has left, and logs its panic if it is a fault.
func afterClientGone(req *http.Request, ended <-chan any) {
	err := <-ended
	if err == http.ErrAbortHandler { //nolint:errorlint // a panic's value, not an error
		err = nil
	}
	metrics.RecordRequestPostTimeout(sourceClientLeft, outcome(err))
	if err != nil {
		slog.ErrorContext(req.Context(), "A handler panicked after its client had left", "method", req.Method,
			"path", req.URL.Path, "panic", err)
	}
}

// maxIdleWorkers bounds the goroutines that wait for something to run, and workerIdleTimeout how long each waits.
const (
	maxIdleWorkers    = 64
	workerIdleTimeout = 500 * time.Millisecond
)

// workerPool are goroutines that run one function after the other.
type workerPool struct {
	mu   sync.Mutex
	idle []chan func() // the last one that has run something comes first: its stack is the warmest
}

// run runs f on another goroutine. f does not panic.
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

// retire takes an idle goroutine out. It reports whether no function is on its way to it.
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

// timeoutWriter is a handler's answer, which is nobody's any more once the time is over.
type timeoutWriter struct {
	w      http.ResponseWriter
	header http.Header // the handler's

	mu                              sync.Mutex
	timedOut, headersSent, hijacked bool
}

// Unwrap implements responsewriter.UserProvidedDecorator.
func (tw *timeoutWriter) Unwrap() http.ResponseWriter { return tw.w }

// Header implements http.ResponseWriter.
func (tw *timeoutWriter) Header() http.Header {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut {
		return http.Header{}
	}
	return tw.header
}

// sendHeaders sends the handler's headers with the answer. The lock is held.
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
	switch {
	case tw.timedOut:
		return 0, http.ErrHandlerTimeout
	case tw.hijacked:
		return 0, http.ErrHijacked
	case !tw.headersSent:
		tw.sendHeaders()
	}
	return tw.w.Write(p)
}

// WriteHeader implements http.ResponseWriter.
func (tw *timeoutWriter) WriteHeader(code int) {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut || tw.headersSent || tw.hijacked {
		return
	}
	tw.sendHeaders()
	tw.w.WriteHeader(code)
}

// Flush implements http.Flusher, as the writer below does.
func (tw *timeoutWriter) Flush() {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if !tw.timedOut {
		tw.w.(http.Flusher).Flush()
	}
}

// CloseNotify implements http.CloseNotifier, as the writer below does.
func (tw *timeoutWriter) CloseNotify() <-chan bool {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut {
		closed := make(chan bool)
		close(closed)
		return closed
	}
	return tw.w.(http.CloseNotifier).CloseNotify() //nolint:staticcheck // upstream's wrapper asks for it
}

// Hijack implements http.Hijacker, as the writer below does.
func (tw *timeoutWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	if tw.timedOut {
		return nil, nil, http.ErrHandlerTimeout
	}
	conn, rw, err := tw.w.(http.Hijacker).Hijack()
	tw.hijacked = tw.hijacked || err == nil
	return conn, rw, err
}

// timeOut answers in the handler's place, or aborts what it has begun to answer: the client is to know that it has not
// all of it.
func (tw *timeoutWriter) timeOut() {
	tw.mu.Lock()
	defer tw.mu.Unlock()
	tw.timedOut = true
	if tw.headersSent || tw.hijacked {
		panic(http.ErrAbortHandler)
	}
	tw.w.WriteHeader(http.StatusGatewayTimeout)
	_ = json.NewEncoder(tw.w).Encode(
		&apierrors.NewTimeoutError("request did not complete within the allotted timeout", 0).ErrStatus)
}
