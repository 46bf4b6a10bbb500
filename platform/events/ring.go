package events

import (
	"slices"
	"sort"
)

// Ring is recent entries in order. Each has a sequence number, by which a cursor stands between two of them; what is
// dropped overruns the cursors that stood there. Its zero value is ready to use; it is guarded by its owner's lock.
type Ring[E any] struct {
	entries []E
	base    int64 // the sequence number of entries[0]
}

// Add appends an entry.
func (r *Ring[E]) Add(e E) { r.entries = append(r.entries, e) }

// Len is how many entries there are.
func (r *Ring[E]) Len() int { return len(r.entries) }

// Base is the sequence number of the oldest entry; a cursor below it is overrun.
func (r *Ring[E]) Base() int64 { return r.base }

// Next is the sequence number that the next entry gets.
func (r *Ring[E]) Next() int64 { return r.base + int64(len(r.entries)) }

// Oldest is the oldest of the entries, of which there must be one.
func (r *Ring[E]) Oldest() E { return r.entries[0] }

// From are the entries from a sequence number on, as many of them as are still there. They are shared: whoever lets go
// of the lock clones them first.
func (r *Ring[E]) From(sequence int64) []E {
	return r.entries[min(max(sequence-r.base, 0), int64(len(r.entries))):]
}

// All is a copy of the entries.
func (r *Ring[E]) All() []E { return slices.Clone(r.entries) }

// Search is the sequence number of the first entry for which f holds, where it holds for all that follow it; Next where
// there is none.
func (r *Ring[E]) Search(f func(E) bool) int64 {
	return r.base + int64(sort.Search(len(r.entries), func(i int) bool { return f(r.entries[i]) }))
}

// Drop forgets the n oldest entries.
func (r *Ring[E]) Drop(n int) {
	clear(r.entries[:n])
	r.entries = r.entries[n:]
	r.base += int64(n)
}

// DropWhile forgets the oldest entries for as long as f holds.
func (r *Ring[E]) DropWhile(f func(E) bool) {
	n := 0
	for n < len(r.entries) && f(r.entries[n]) {
		n++
	}
	r.Drop(n)
}

// Reset forgets everything and overruns every cursor, also those that have seen every entry.
func (r *Ring[E]) Reset() {
	r.base += int64(len(r.entries)) + 1
	r.entries = nil
}
