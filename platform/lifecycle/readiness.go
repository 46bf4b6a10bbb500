package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"watershed.dev/platform/watchable"
)

// Readiness is why something cannot serve yet: a reason for each thing that it waits for, by name. Its zero value is
// ready; its methods may be called by any number of goroutines.
type Readiness struct {
	reasons watchable.Value[map[string]error]
}

// Set says why what is waited for is not there, or with nil that it is.
func (r *Readiness) Set(name string, reason error) {
	r.reasons.Update(func(old map[string]error) (map[string]error, bool) {
		if _, waiting := old[name]; !waiting && reason == nil {
			return old, false
		}
		reasons := maps.Clone(old)
		if reason == nil {
			delete(reasons, name)
			return reasons, true
		}
		if reasons == nil {
			reasons = map[string]error{}
		}
		reasons[name] = reason
		return reasons, true
	})
}

// Err is the first reason by name, or nil.
func (r *Readiness) Err() error {
	_, err := r.get()
	return err
}

// get is Err; changed is closed when that may be another.
func (r *Readiness) get() (changed <-chan struct{}, err error) {
	reasons, changed := r.reasons.Get()
	for _, name := range slices.Sorted(maps.Keys(reasons)) {
		return changed, fmt.Errorf("%s: %w", name, reasons[name])
	}
	return changed, nil
}

// Wait waits until there is no reason; where ctx ends before, the error is the reason.
func (r *Readiness) Wait(ctx context.Context) error {
	for {
		changed, err := r.get()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-changed:
		}
	}
}

// OnChange calls told with the state now, and whenever it has changed, until ctx is done.
func (r *Readiness) OnChange(ctx context.Context, notify func(err error)) {
	for {
		changed, err := r.get()
		notify(err)
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
	}
}

// NotReady is a readiness that waits for one thing.
func NotReady(name string) *Readiness {
	r := &Readiness{}
	r.Set(name, errors.New("it is starting"))
	return r
}
