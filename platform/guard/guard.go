// Package guard makes a panic an error where one object, one message or one task must not end the process.
package guard

import (
	"fmt"
	"log/slog"
	"runtime/debug"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// logEvery is how often a panic is logged at most: whoever can cause one can cause many.
const logEvery = time.Second

var (
	logged   atomic.Int64
	unlogged atomic.Int64
	panics   = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "watershed_panics_total",
		Help: "Panics that ended what they were in and nothing else.",
	})
)

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector { return []prometheus.Collector{panics} }

// Error makes the panic of the function that defers it the function's error, and logs it with its stack, if none was
// lately. what says in what: "reading pods/x".
func Error(what string, err *error) {
	if r := recover(); r != nil {
		panics.Inc()
		now := time.Now().UnixNano()
		if last := logged.Load(); now-last > int64(logEvery) && logged.CompareAndSwap(last, now) {
			slog.Error("A panic is contained", "in", what, "panic", r, "unlogged", unlogged.Swap(0), "stack", string(debug.Stack()))
		} else {
			unlogged.Add(1)
		}
		*err = fmt.Errorf("%s panicked: %v", what, r)
	}
}
