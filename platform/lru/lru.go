// Package lru keeps values within a bound of bytes: those that were last asked for.
package lru

import (
	"container/list"
	"sync"
	"time"
)

// Cache keeps values by their keys. It is for any number of goroutines.
type Cache[K comparable, V any] struct {
	limit int

	mu    sync.Mutex
	byKey map[K]*list.Element
	order list.List // of *entry, the last asked for in front
	bytes int
}

type entry[K comparable, V any] struct {
	key      K
	value    V
	bytes    int
	lastUsed time.Time
}

// New returns a cache of at most so many bytes, as whoever keeps a value counts them. Where that is 0 it keeps nothing.
func New[K comparable, V any](limit int) *Cache[K, V] {
	return &Cache[K, V]{limit: limit, byKey: map[K]*list.Element{}}
}

// Get is what is kept at key, which is asked for so.
func (c *Cache[K, V]) Get(key K) (value V, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e, ok := c.byKey[key]
	if !ok {
		return value, false
	}
	c.order.MoveToFront(e)
	cached := e.Value.(*entry[K, V])
	cached.lastUsed = time.Now()
	return cached.value, true
}

// Put keeps a value at key in place of what was there, unless it has no room by itself.
func (c *Cache[K, V]) Put(key K, value V, bytes int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.put(key, value, bytes)
}

func (c *Cache[K, V]) put(key K, value V, bytes int) {
	if e, ok := c.byKey[key]; ok {
		c.remove(e)
	}
	if bytes > c.limit {
		return
	}
	c.byKey[key] = c.order.PushFront(&entry[K, V]{key, value, bytes, time.Now()})
	for c.bytes += bytes; c.bytes > c.limit; {
		c.remove(c.order.Back())
	}
}

// PutUnless is Put where nothing is kept at key that stays, in one step. It answers what stays, or else value.
func (c *Cache[K, V]) PutUnless(key K, retain func(V) bool, value V, bytes int) V {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byKey[key]; ok {
		if cached := e.Value.(*entry[K, V]).value; retain(cached) {
			return cached
		}
	}
	c.put(key, value, bytes)
	return value
}

// RemoveIf forgets what is kept at key if it is what goes. It is not asked for so.
func (c *Cache[K, V]) RemoveIf(key K, match func(V) bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e, ok := c.byKey[key]; ok && match(e.Value.(*entry[K, V]).value) {
		c.remove(e)
	}
}

func (c *Cache[K, V]) remove(e *list.Element) {
	old := c.order.Remove(e).(*entry[K, V])
	delete(c.byKey, old.key)
	c.bytes -= old.bytes
}

// EvictIdle forgets what nobody has asked for for some time.
func (c *Cache[K, V]) EvictIdle(idle time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for e := c.order.Back(); e != nil && time.Since(e.Value.(*entry[K, V]).lastUsed) >= idle; e = c.order.Back() {
		c.remove(e)
	}
}

// Clear forgets everything.
func (c *Cache[K, V]) Clear() { c.EvictIdle(0) }

// Bytes is how much is kept.
func (c *Cache[K, V]) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
