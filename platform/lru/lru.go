// Package lru caches values within a bound of bytes, and evicts the least recently used. It starts no goroutine:
// callers evict idle values with EvictIdle.
package lru

import (
	"container/list"
	"sync"
	"time"
)

// Cache caches values by key. Any goroutine may use it.
type Cache[K comparable, V any] struct {
	limit int

	mu    sync.Mutex
	byKey map[K]*list.Element
	order list.List // of *entry, the most recently used first
	bytes int
}

type entry[K comparable, V any] struct {
	key      K
	value    V
	bytes    int
	lastUsed time.Time
}

// New returns a cache of at most limit bytes, as the callers of Put count them. With limit 0 it caches nothing.
func New[K comparable, V any](limit int) *Cache[K, V] {
	return &Cache[K, V]{limit: limit, byKey: map[K]*list.Element{}}
}

// Get returns the value at key, and marks it as used.
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

// Put replaces the value at key. A value larger than the limit is not cached, and the old value is still removed.
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

// PutUnless returns the value at key if retain is true for it. Otherwise it puts value and returns it. Both are one
// atomic step.
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

// RemoveIf removes the value at key if match is true for it. It does not mark the value as used.
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

// EvictIdle removes the values that were not used for the duration idle. Callers of other methods wait for a few of
// them only.
func (c *Cache[K, V]) EvictIdle(idle time.Duration) {
	for until := time.Now().Add(-idle); c.evict(until); {
	}
}

// evictBatch is the number of values that EvictIdle removes at a time.
const evictBatch = 256

// evict removes values that were last used at the time until or before, and returns whether there may be more.
func (c *Cache[K, V]) evict(until time.Time) (more bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for range evictBatch {
		e := c.order.Back()
		if e == nil || e.Value.(*entry[K, V]).lastUsed.After(until) {
			return false
		}
		c.remove(e)
	}
	return true
}

// Clear removes all values.
func (c *Cache[K, V]) Clear() {
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.byKey)
	c.order.Init()
	c.bytes = 0
}

// Bytes returns the size of the cached values.
func (c *Cache[K, V]) Bytes() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.bytes
}
