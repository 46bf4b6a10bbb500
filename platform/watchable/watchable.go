// Package watchable has values that can be waited for.
package watchable

import "sync"

// Signal wakes everybody who waits for something to change. Its zero value is ready to use; it is guarded by the lock
// of what it tells of.
type Signal struct{ c chan struct{} }

// C is closed at the next Notify.
func (s *Signal) C() <-chan struct{} {
	if s.c == nil {
		s.c = make(chan struct{})
	}
	return s.c
}

// Notify wakes all who wait.
func (s *Signal) Notify() {
	if s.c != nil {
		close(s.c)
		s.c = nil
	}
}

// Value is a value of which the newest state alone counts. Its zero value holds T's; its methods may be called by any
// number of goroutines.
type Value[T any] struct {
	mu      sync.Mutex
	value   T
	changed Signal
}

// Get is the value now; changed is closed when it is set again.
func (v *Value[T]) Get() (value T, changed <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.value, v.changed.C()
}

// Set makes value the one that Get answers, and wakes all who wait.
func (v *Value[T]) Set(value T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.value = value
	v.changed.Notify()
}

// Update sets what update makes of the value, and wakes all who wait if it says that it has changed.
func (v *Value[T]) Update(update func(T) (T, bool)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	next, changed := update(v.value)
	if changed {
		v.value = next
		v.changed.Notify()
	}
}
