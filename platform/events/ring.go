package events

import (
	"slices"
	"sort"
)

// Ring holds recent entries in order. Each entry has a sequence number. A cursor is the sequence number of the next
// entry to read, and dropping that entry overruns the cursor. The zero value is ready to use. The lock of the owner
// guards it.
type Ring[E any] struct {
	entries []E
	base    int64 // sequence number of entries[0]
}

// Add appends an entry.
func (r *Ring[E]) Add(e E) { r.entries = append(r.entries, e) }

// Len returns the number of entries.
func (r *Ring[E]) Len() int { return len(r.entries) }

// Base returns the sequence number of the oldest entry. A lower cursor is overrun.
func (r *Ring[E]) Base() int64 { return r.base }

// Next returns the sequence number of the next added entry.
func (r *Ring[E]) Next() int64 { return r.base + int64(len(r.entries)) }

// Oldest returns the oldest entry. The ring must not be empty.
func (r *Ring[E]) Oldest() E { return r.entries[0] }

// From returns the entries from a sequence number on that are not dropped. The slice is shared: clone it before
// releasing the lock.
func (r *Ring[E]) From(sequence int64) []E {
	return r.entries[min(max(sequence-r.base, 0), int64(len(r.entries))):]
}

// All returns a copy of the entries.
func (r *Ring[E]) All() []E { return slices.Clone(r.entries) }

// Search returns the sequence number of the first entry for which f is true, or Next. f must be true for all entries
// after it.
func (r *Ring[E]) Search(f func(E) bool) int64 {
	return r.base + int64(sort.Search(len(r.entries), func(i int) bool { return f(r.entries[i]) }))
}

// Drop removes the n oldest entries.
func (r *Ring[E]) Drop(n int) {
	clear(r.entries[:n])
	r.entries = r.entries[n:]
	if len(r.entries) == 0 {
		r.entries = nil // frees the memory
	}
	r.base += int64(n)
}

// DropWhile removes the oldest entries while f is true.
func (r *Ring[E]) DropWhile(f func(E) bool) {
	n := 0
	for n < len(r.entries) && f(r.entries[n]) {
		n++
	}
	r.Drop(n)
}

// Reset removes all entries and overruns every cursor, including cursors that have read every entry.
func (r *Ring[E]) Reset() {
	r.base += int64(len(r.entries)) + 1
	r.entries = nil
}
