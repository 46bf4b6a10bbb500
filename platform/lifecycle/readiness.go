package lifecycle

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"watershed.dev/platform/watchable"
)

// Readiness is why a component cannot serve yet: a reason per name. It is ready while it has no reason, as its zero
// value. Its methods are safe for concurrent use.
type Readiness struct {
	reasons watchable.Value[map[string]error]
}

// Set sets the reason of a name. A nil reason removes it.
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

// Err returns the reason of the first name in sorted order, or nil.
func (r *Readiness) Err() error {
	_, err := r.get()
	return err
}

// get returns Err, and a channel that is closed when the reasons change.
func (r *Readiness) get() (changed <-chan struct{}, err error) {
	reasons, changed := r.reasons.Get()
	for _, name := range slices.Sorted(maps.Keys(reasons)) {
		return changed, fmt.Errorf("%s: %w", name, reasons[name])
	}
	return changed, nil
}

// Wait waits until there is no reason. If ctx ends first, it returns the reason.
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

// OnChange calls notify with the current reason, and again after every change, until ctx is done.
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

// NotReady returns a Readiness in which name is starting.
func NotReady(name string) *Readiness {
	r := &Readiness{}
	r.Set(name, errors.New("it is starting"))
	return r
}
