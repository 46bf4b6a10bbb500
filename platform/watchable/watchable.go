// Package watchable provides values that goroutines can wait for. It starts no goroutine.
package watchable

import "sync"

// Signal wakes all goroutines that wait for a change. Its zero value is ready to use. The lock of the changing state
// guards it.
type Signal struct{ c chan struct{} }

// C returns a channel that the next Notify closes.
func (s *Signal) C() <-chan struct{} {
	if s.c == nil {
		s.c = make(chan struct{})
	}
	return s.c
}

// Notify wakes all waiting goroutines.
func (s *Signal) Notify() {
	if s.c != nil {
		close(s.c)
		s.c = nil
	}
}

// Value holds a value of which only the newest state matters. Its zero value holds the zero T. Any goroutine may call
// its methods.
type Value[T any] struct {
	mu      sync.Mutex
	value   T
	changed Signal
}

// Get returns the current value. The next change closes changed.
func (v *Value[T]) Get() (value T, changed <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.value, v.changed.C()
}

// Set replaces the value and wakes all waiting goroutines.
func (v *Value[T]) Set(value T) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.value = value
	v.changed.Notify()
}

// Update replaces the value with the result of update. It wakes all waiting goroutines if update reports a change.
func (v *Value[T]) Update(update func(T) (T, bool)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	next, changed := update(v.value)
	if changed {
		v.value = next
		v.changed.Notify()
	}
}
