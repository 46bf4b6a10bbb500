package delegatedauth

import (
	"container/list"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/lifecycle"
)

// cache holds values until they expire, in a bounded number of bytes, with a lower bound for each owner. It evicts the
// least recently used entry first. Its methods are safe for concurrent use.
type cache[V any] struct {
	// limit bounds all entries in bytes, and ownerLimit the entries of each owner.
	limit, ownerLimit int
	sizeGauge         prometheus.Gauge

	mu      sync.Mutex
	entries map[digest]*cacheEntry[V]
	lru     list.List // of *cacheEntry[V], most recently used first
	owners  map[string]*cacheOwner
	bytes   int
}

type cacheOwner struct {
	lru   list.List
	bytes int
}

type cacheEntry[V any] struct {
	key            digest
	owner          string
	value          V
	expiresAt      time.Time
	bytes          int
	inAll, inOwner *list.Element
}

// entryBytes is the approximate size of an entry without its value: the key, two list elements and two map entries.
const entryBytes = 400

func newCache[V any](limit, share int, size prometheus.Gauge) *cache[V] {
	return &cache[V]{
		limit:      limit,
		ownerLimit: share,
		sizeGauge:  size,
		entries:    map[digest]*cacheEntry[V]{},
		owners:     map[string]*cacheOwner{},
	}
}

// get returns the value of a key, unless it has expired.
func (c *cache[V]) get(key digest) (V, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[key]
	if e != nil && lifecycle.Age(e.expiresAt) > 0 {
		c.remove(e)
		e = nil
	}
	if e == nil {
		var none V
		return none, false
	}
	c.lru.MoveToFront(e.inAll)
	c.owners[e.owner].lru.MoveToFront(e.inOwner)
	return e.value, true
}

// put adds a value with its size in bytes and its owner. A value larger than ownerLimit is not added.
func (c *cache[V]) put(key digest, owner string, value V, bytes int, expiresAt time.Time) {
	bytes += entryBytes + len(owner)
	c.mu.Lock()
	defer c.mu.Unlock()
	if old := c.entries[key]; old != nil {
		c.remove(old)
	}
	if bytes > c.ownerLimit {
		return
	}
	for o := c.owners[owner]; o != nil && o.bytes+bytes > c.ownerLimit; o = c.owners[owner] {
		c.remove(o.lru.Back().Value.(*cacheEntry[V]))
	}
	for c.bytes+bytes > c.limit {
		c.remove(c.lru.Back().Value.(*cacheEntry[V]))
	}
	o := c.owners[owner]
	if o == nil {
		o = &cacheOwner{}
		c.owners[owner] = o
	}
	e := &cacheEntry[V]{
		key:       key,
		owner:     owner,
		value:     value,
		expiresAt: expiresAt,
		bytes:     bytes,
	}
	e.inAll, e.inOwner = c.lru.PushFront(e), o.lru.PushFront(e)
	c.entries[key] = e
	o.bytes += bytes
	c.bytes += bytes
	c.sizeGauge.Set(float64(c.bytes))
}

func (c *cache[V]) remove(e *cacheEntry[V]) {
	o := c.owners[e.owner]
	c.lru.Remove(e.inAll)
	o.lru.Remove(e.inOwner)
	delete(c.entries, e.key)
	c.bytes -= e.bytes
	if o.bytes -= e.bytes; o.lru.Len() == 0 {
		delete(c.owners, e.owner)
	}
	c.sizeGauge.Set(float64(c.bytes))
}

// digest is a cache key: a SHA-256 over a secret of this process and the inputs. Its length does not depend on the
// client, and credentials cannot be recovered from it.
type digest [sha256.Size]byte

// digestKey is the secret of this process.
var digestKey = func() (key [32]byte) {
	_, _ = rand.Read(key[:]) // never fails
	return key
}()

// maxKeyBytes is the length of a key's inputs, in bytes, above which nothing is cached.
const maxKeyBytes = 16 << 10

// digester computes a digest of parts. The length of a part precedes it, so that different sequences of parts have
// different digests.
type digester struct{ data []byte }

var digesters = sync.Pool{New: func() any { return &digester{data: make([]byte, 0, 4<<10)} }}

func newDigester() *digester {
	d := digesters.Get().(*digester)
	d.data = append(d.data[:0], digestKey[:]...)
	return d
}

func (d *digester) part(s string) {
	d.number(len(s))
	if len(d.data) <= maxKeyBytes { // sum fails above it
		d.data = append(d.data, s...)
	}
}

func (d *digester) number(n int) { d.data = binary.BigEndian.AppendUint32(d.data, uint32(n)) }

// sumSoFar returns the digest of the parts so far. It differs from the digest of any longer sequence, because it ends
// with a length that no part can have.
func (d *digester) sumSoFar() (sum digest) {
	n := len(d.data)
	d.number(-1)
	sum = sha256.Sum256(d.data)
	d.data = d.data[:n]
	return sum
}

// sum returns the digest. ok is false if the parts are too long for a key. The caller must not use the digester
// afterwards.
func (d *digester) sum() (sum digest, ok bool) {
	ok = len(d.data) <= maxKeyBytes
	if ok {
		sum = sha256.Sum256(d.data)
	}
	if cap(d.data) <= 2*maxKeyBytes {
		clear(d.data)
		digesters.Put(d)
	}
	return sum, ok
}
