// Package warnings carries what is to be told to a client beside the answer from the service that says it to the
// gateway that answers.
package warnings

import (
	"context"
	"slices"
	"sync"

	"k8s.io/apiserver/pkg/warning"
)

// Recorder gathers warnings. Its methods may be called by any number of goroutines.
type Recorder struct {
	mu   sync.Mutex
	list []string
}

// Record returns a context in which warnings are gathered, and what gathers them.
func Record(ctx context.Context) (context.Context, *Recorder) {
	r := &Recorder{}
	return warning.WithWarningRecorder(ctx, r), r
}

// AddWarning implements warning.Recorder. Who warns is not told to clients.
func (r *Recorder) AddWarning(_, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !slices.Contains(r.list, text) {
		r.list = append(r.list, text)
	}
}

// List is what has been said, each once and in order.
func (r *Recorder) List() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.list)
}

// Tell hands warnings of another service to whoever answers the request of ctx.
func Tell(ctx context.Context, list []string) {
	for _, text := range list {
		warning.AddWarning(ctx, "", text)
	}
}
