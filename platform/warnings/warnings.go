// Package warnings carries the warnings of a service to the gateway, which sends them to the client as Warning headers.
// The package does not write HTTP headers.
package warnings

import (
	"context"
	"sync"
	"unicode/utf8"

	"k8s.io/apiserver/pkg/warning"
)

const (
	// maxRunes bounds the warnings of a response, in runes; a longer warning counts as maxItemRunes. The recorder
	// caches no more than that (k8s.io/apiserver/pkg/endpoints/filters, WithWarningRecorder).
	maxRunes     = 4 << 10
	maxItemRunes = 256
)

// Recorder collects the warnings of a request, up to the bound of a response. Any goroutine may call its methods.
type Recorder struct {
	mu    sync.Mutex
	seen  map[string]struct{}
	list  []string
	runes int
}

// WithRecorder returns a context that records warnings, and its recorder.
func WithRecorder(ctx context.Context) (context.Context, *Recorder) {
	r := &Recorder{}
	return warning.WithWarningRecorder(ctx, r), r
}

// AddWarning implements warning.Recorder. It ignores the agent, because clients do not receive it.
func (r *Recorder) AddWarning(_, text string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.runes >= maxRunes {
		return
	}
	if _, ok := r.seen[text]; ok || text == "" {
		return
	}
	if len(text) > maxRunes { // a client receives only the beginning of a text this long
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

// List returns the warnings in order, without duplicates.
func (r *Recorder) List() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.list...)
}

// Forward adds the warnings of another service to the recorder of ctx.
func Forward(ctx context.Context, list []string) {
	for _, text := range list {
		warning.AddWarning(ctx, "", text)
	}
}
