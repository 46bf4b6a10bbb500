package edge

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

// timely answers 504 in place of a handler that is not done when the request's time is over, or ends the answer that it
// has begun; long-running requests have no time (k8s.io/apiserver/pkg/server/filters/timeout.go,
// WithTimeoutForNonLongRunningRequests). One without RequestInfo, which the chain does not let happen, has no time. The
// handler runs on another goroutine, since it may go on: on one that has run
// handlers before, whose stack has grown to what they need.
//
// A client that leaves ends its request as well. Upstream counts and logs that as a timeout. timely does neither,
// because a client can leave as often as it likes. It counts handlers that go on after either.
func timely(h http.Handler, labelled Labelled) http.Handler {
	pool := &workers{}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || LongRunning(req, info) {
			h.ServeHTTP(w, req)
			return
		}
		late := &lateWriter{w: w, header: maps.Clone(w.Header())}
		inner := responsewriter.WrapForHTTP1Or2(late)
		own := ownOf(req)
		ended := make(chan any, 1)
		pool.run(func() { ended <- panicOf(func() { h.ServeHTTP(inner, own) }) })
		select {
		case err := <-ended:
			if err != nil {
				panic(err)
			}
		case <-req.Context().Done():
			httplog.SetStacktracePredicate(req.Context(), func(int) bool { return false })
			if left(req) {
				go afterLeaving(req, ended)
			} else {
				go afterTimeout(req, time.Now(), ended)
				defer metrics.RecordRequestTermination(req, labelled(info), metrics.APIServerComponent,
					http.StatusGatewayTimeout)
			}
			late.timeOut()
		}
	})
}

// left reports whether the request's client has closed its connection or its stream. The deadline of a request ends its
// context with another error.
func left(req *http.Request) bool { return errors.Is(req.Context().Err(), context.Canceled) }

// ownOf is a handler's own request: it changes its headers and its URL, and may outlive the one that it was made of.
// What the headers' values are, nobody changes.
func ownOf(req *http.Request) *http.Request {
	own, url := *req, *req.URL
	own.Header, own.URL = maps.Clone(req.Header), &url
	return &own
}

// panicOf is what f panics with, with its stack where that is worth telling, or nil.
func panicOf(f func()) (err any) {
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

// afterLeaving waits for the handler of a request whose client has left, and logs its panic if it is a fault.
func afterLeaving(req *http.Request, ended <-chan any) {
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

// idleWorkers bounds the goroutines that wait for something to run, and idleFor how long each waits.
const (
	idleWorkers = 64
	idleFor     = 500 * time.Millisecond
)

// workers are goroutines that run one function after the other.
type workers struct {
	mu   sync.Mutex
	idle []chan func() // the last one that has run something comes first: its stack is the warmest
}

// run runs f on another goroutine. f does not panic.
func (p *workers) run(f func()) {
	p.mu.Lock()
	n := len(p.idle)
	if n == 0 {
		p.mu.Unlock()
		go p.work(f)
		return
	}
	one := p.idle[n-1]
	p.idle = p.idle[:n-1]
	p.mu.Unlock()
	one <- f
}

func (p *workers) work(f func()) {
	next := make(chan func(), 1)
	idle := time.NewTimer(idleFor)
	defer idle.Stop()
	for {
		f()
		p.mu.Lock()
		if len(p.idle) >= idleWorkers {
			p.mu.Unlock()
			return
		}
		p.idle = append(p.idle, next)
		p.mu.Unlock()
		idle.Reset(idleFor)
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
func (p *workers) retire(next chan func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.idle, next)
	if i < 0 {
		return false
	}
	p.idle = slices.Delete(p.idle, i, i+1)
	return true
}

// lateWriter is a handler's answer, which is nobody's any more once the time is over.
type lateWriter struct {
	w      http.ResponseWriter
	header http.Header // the handler's

	mu                    sync.Mutex
	over, begun, hijacked bool
}

// Unwrap implements responsewriter.UserProvidedDecorator.
func (l *lateWriter) Unwrap() http.ResponseWriter { return l.w }

// Header implements http.ResponseWriter.
func (l *lateWriter) Header() http.Header {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return http.Header{}
	}
	return l.header
}

// begin sends the handler's headers with the answer. The lock is held.
func (l *lateWriter) begin() {
	to := l.w.Header()
	for k, v := range l.header {
		to[k] = v
	}
	l.begun = true
}

// Write implements http.ResponseWriter.
func (l *lateWriter) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.over:
		return 0, http.ErrHandlerTimeout
	case l.hijacked:
		return 0, http.ErrHijacked
	case !l.begun:
		l.begin()
	}
	return l.w.Write(p)
}

// WriteHeader implements http.ResponseWriter.
func (l *lateWriter) WriteHeader(code int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over || l.begun || l.hijacked {
		return
	}
	l.begin()
	l.w.WriteHeader(code)
}

// Flush implements http.Flusher, as the writer below does.
func (l *lateWriter) Flush() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.over {
		l.w.(http.Flusher).Flush()
	}
}

// CloseNotify implements http.CloseNotifier, as the writer below does.
func (l *lateWriter) CloseNotify() <-chan bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		closed := make(chan bool)
		close(closed)
		return closed
	}
	return l.w.(http.CloseNotifier).CloseNotify() //nolint:staticcheck // upstream's wrapper asks for it
}

// Hijack implements http.Hijacker, as the writer below does.
func (l *lateWriter) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return nil, nil, http.ErrHandlerTimeout
	}
	conn, rw, err := l.w.(http.Hijacker).Hijack()
	l.hijacked = l.hijacked || err == nil
	return conn, rw, err
}

// timeOut answers in the handler's place, or aborts what it has begun to answer: the client is to know that it has not
// all of it.
func (l *lateWriter) timeOut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	if l.begun || l.hijacked {
		panic(http.ErrAbortHandler)
	}
	l.w.WriteHeader(http.StatusGatewayTimeout)
	_ = json.NewEncoder(l.w).Encode(
		&apierrors.NewTimeoutError("request did not complete within the allotted timeout", 0).ErrStatus)
}
