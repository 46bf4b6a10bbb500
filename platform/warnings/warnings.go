// Package warnings carries what is to be told to a client beside the answer from the service that says it to the
// gateway that answers.
package warnings

import (
	"context"
	"sync"
	"unicode/utf8"

	"k8s.io/apiserver/pkg/warning"
)

const (
	// maxRunes is how many runes of warnings a client is told, of which a long one counts as item: no more are kept here
	// either (k8s.io/apiserver/pkg/endpoints/filters, WithWarningRecorder).
	maxRunes     = 4 << 10
	maxItemRunes = 256
)

// Recorder gathers warnings, as many as a client is told. Its methods may be called by any number of goroutines.
type Recorder struct {
	mu    sync.Mutex
	seen  map[string]struct{}
	list  []string
	runes int
}

// WithRecorder returns a context in which warnings are gathered, and what gathers them.
func WithRecorder(ctx context.Context) (context.Context, *Recorder) {
	r := &Recorder{}
	return warning.WithWarningRecorder(ctx, r), r
}

// AddWarning implements warning.Recorder. Who warns is not told to clients.
func (r *Recorder) AddWarning(_, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.runes >= maxRunes {
		return
	}
	if _, ok := r.seen[text]; ok || text == "" {
		return
	}
	if len(text) > maxRunes { // a client is told the beginning alone of what is longer than all
		n := 0
		for i := range text {
			if n++; n > maxRunes+1 {
				text = text[:i]
				break
			}
		}
	}
	if r.seen == nil {
		r.seen = map[string]struct{}{}
	}
	r.seen[text] = struct{}{}
	r.list = append(r.list, text)
	r.runes += min(utf8.RuneCountInString(text), maxItemRunes)
}

// List is what has been said, each once and in order.
func (r *Recorder) List() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.list...)
}

// Forward hands warnings of another service to whoever answers the request of ctx.
func Forward(ctx context.Context, list []string) {
	for _, text := range list {
		warning.AddWarning(ctx, "", text)
	}
}
