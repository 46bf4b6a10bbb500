// Package recovery converts panics into errors, so that a single object, message or task cannot end the process.
package recovery

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
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

// ToError converts a panic of the function that defers it into the error of that function. It logs the panic with its
// stack, once per logInterval and operation. An operation is a phrase like "loading pods".
func ToError(operation string, err *error) {
	if r := recover(); r != nil {
		panics.Inc()
		if shouldLog(operation) {
			slog.Error("Recovered from a panic", "operation", operation, "panic", r, "stack", string(debug.Stack()))
		}
		*err = fmt.Errorf("%s panicked: %v", operation, r)
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
