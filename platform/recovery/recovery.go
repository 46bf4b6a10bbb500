// Package guard makes a panic an error where one object, one message or one task must not end the process.
package recovery

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// logInterval is how often a panic in one thing is logged at most: whoever can cause one can cause many. maxOperations bounds
// the things that are told apart.
const (
	logInterval   = time.Second
	maxOperations = 1000
)

var (
	mu         sync.Mutex
	lastLogged = map[string]time.Time{}

	panics = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_panics_total",
		Help: "Panics that ended what they were in and nothing else.",
	})
)

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{panics} }

// ToError makes the panic of the function that defers it the function's error. It logs it with its stack, once in
// logInterval for each what, which says in what: "loading pods".
func ToError(operation string, err *error) {
	if r := recover(); r != nil {
		panics.Inc()
		if shouldLog(operation) {
			slog.Error("A panic is contained", "in", operation, "panic", r, "stack", string(debug.Stack()))
		}
		*err = fmt.Errorf("%s panicked: %v", operation, r)
	}
}

// shouldLog says whether a panic in what is to be logged.
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
