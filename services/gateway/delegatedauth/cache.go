package delegatedauth

import (
	"container/list"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// cache remembers answers for a while, in a bounded number of bytes, of which one owner may take a part. What was used
// least lately goes first. Its methods may be called by any number of goroutines.
type cache[V any] struct {
	// limit bounds all entries in bytes, and share those of one owner.
	limit, ownerLimit int
	sizeGauge         prometheus.Gauge

	mu      sync.Mutex
	entries map[digest]*cacheEntry[V]
	lru     list.List // of *cacheEntry[V], the newest first
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

// entryBytes is about what an entry takes beside its value: its key, its places in two lists and in two maps.
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

// get is what was kept under a key and has not expired.
func (c *cache[V]) get(key digest) (V, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := c.entries[key]
	if e != nil && time.Now().After(e.expiresAt) {
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

// put keeps a value of some bytes for an owner.
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

// digest is a cache key: a SHA-256 over a secret of this process and the inputs. Its length is not the client's to
// choose, and credentials cannot be recovered from it.
type digest [sha256.Size]byte

// digestKey is this process's own.
var digestKey = func() (key [32]byte) {
	_, _ = rand.Read(key[:]) // never fails
	return key
}()

// maxKeyBytes is the length of a key's inputs, in bytes, above which nothing is kept.
const maxKeyBytes = 16 << 10

// digester makes a digest of parts. Each is preceded by its length: no two sequences of parts are the same.
type digester struct{ data []byte }

var digesters = sync.Pool{New: func() any { return &digester{data: make([]byte, 0, 4<<10)} }}

func newDigester() *digester {
	d := digesters.Get().(*digester)
	d.data = append(d.data[:0], digestKey[:]...)
	return d
}

func (d *digester) part(s string) {
	d.number(len(s))
	if len(d.data) <= maxKeyBytes { // beyond it nothing will be kept
		d.data = append(d.data, s...)
	}
}

func (d *digester) number(n int) { d.data = binary.BigEndian.AppendUint32(d.data, uint32(n)) }

// sumSoFar is the digest of the parts so far. It is never that of more parts, whatever they are: it ends with a length
// that no part has.
func (d *digester) sumSoFar() (sum digest) {
	n := len(d.data)
	d.number(-1)
	sum = sha256.Sum256(d.data)
	d.data = d.data[:n]
	return sum
}

// sum is the digest; ok is false where the parts are too long to be kept under one. The digester must not be used
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
