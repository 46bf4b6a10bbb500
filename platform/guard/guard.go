// Package guard makes a panic an error where one object, one message or one task must not end the process.
package guard

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// logEvery is how often a panic in one thing is logged at most: whoever can cause one can cause many. maxThings bounds
// the things that are told apart.
const (
	logEvery  = time.Second
	maxThings = 1000
)

var (
	mu     sync.Mutex
	logged = map[string]time.Time{}

	panics = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_panics_total",
		Help: "Panics that ended what they were in and nothing else.",
	})
)

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{panics} }

// Error makes the panic of the function that defers it the function's error. It logs it with its stack, once in
// logEvery for each what, which says in what: "loading pods".
func Error(what string, err *error) {
	if r := recover(); r != nil {
		panics.Inc()
		if due(what) {
			slog.Error("A panic is contained", "in", what, "panic", r, "stack", string(debug.Stack()))
		}
		*err = fmt.Errorf("%s panicked: %v", what, r)
	}
}

// due says whether a panic in what is to be logged.
func due(what string) bool {
	mu.Lock()
	defer mu.Unlock()
	if len(logged) >= maxThings {
		clear(logged)
	}
	if time.Since(logged[what]) < logEvery {
		return false
	}
	logged[what] = time.Now()
	return true
}
