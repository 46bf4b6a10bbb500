// Package recovery counts and logs panics, and converts them into errors, so that a single object, message or task
// cannot end the process.
package recovery

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
)

// logInterval is the minimum interval between log lines about panics of an operation, because a client that can cause
// one panic can cause many. maxOperations bounds the recorded operations.
const (
	logInterval   = time.Second
	maxOperations = 1000
)

var (
	mu         sync.Mutex
	lastLogged = map[string]time.Time{}

	panics = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_panics_total",
		Help: "Panics that ended only the operation in which they occurred.",
	})
)

// Metrics returns this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{panics} }

// Kubernetes' libraries recover by HandleCrash, which calls these handlers.
func init() {
	utilruntime.PanicHandlers = []func(context.Context, any){func(_ context.Context, p any) {
		if p != http.ErrAbortHandler { //nolint:errorlint // a panic's value, not an error
			Observe("code of Kubernetes' libraries", p)
		}
	}}
}

// ToError converts a panic of the function that defers it into the error of that function. An operation is a phrase
// like "loading pods".
func ToError(operation string, err *error) {
	if p := recover(); p != nil {
		Observe(operation, p)
		*err = fmt.Errorf("%s panicked: %v", operation, p)
	}
}

// Observe counts a recovered panic. It logs the panic with its stack, once per logInterval and operation. The deferred
// function that recovers calls it.
func Observe(operation string, p any) {
	panics.Inc()
	if shouldLog(operation) {
		slog.Error("Recovered from a panic", "operation", operation, "panic", p, "stack", string(debug.Stack()))
	}
}

// shouldLog reports if a panic of an operation should be logged now.
func shouldLog(operation string) bool {
	mu.Lock()
	defer mu.Unlock()
	if len(lastLogged) >= maxOperations {
		clear(lastLogged)
	}
	if time.Since(lastLogged[operation]) < logInterval {
		return false
	}
	lastLogged[operation] = time.Now()
	return true
}
