package conversion

import (
	"time"
	"unique"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/lru"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/query"
)

const (
	// cacheBytes bounds what is kept of rows, and again of what is as large as objects: it is not to take their room.
	cacheBytes = 64 << 20
	// entryOverhead is about what keeping one encoding takes beside its bytes, and ageBytes what each of its ages adds.
	entryOverhead = 300
	ageBytes      = 40
	// rowTTL is how long a row may be used whose ages are told anew. It has an end since a later release of registry
	// may print another one.
	rowTTL = 10 * time.Minute
	// versionTTL is how long another version of an object may be used: a webhook that converts may come to make
	// another.
	versionTTL = time.Minute
	// shortTTL is how long a row may be used whose ages are not all known: what it tells is at most so much too young.
	// So it is with a Table's columns, by which a change of release is noticed.
	shortTTL = time.Second
)

// cacheKey is what registry was asked to encode, and in which form.
type cacheKey struct {
	// serial is the item's, and 0 for the columns of a Table.
	serial      uint64
	encodingKey unique.Handle[query.EncodingKey]
	// crdRevision is where the resource's definition last changed, as the replica knew when it asked.
	crdRevision int64
	// columns are those of a row's Table.
	columns unique.Handle[string]
}

// encoding is what registry has made.
type encoding struct {
	data []byte
	// ages are the parts of a row's data that are told anew each time.
	ages    []age
	expires time.Time
}

// encodingCache remembers what registry has made of objects: many ask for the same.
type encodingCache struct {
	entries *lru.Cache[cacheKey, *encoding]
	// requests counts encodings by whether they were kept.
	requests *prometheus.CounterVec
}

func newEncodingCache(requests *prometheus.CounterVec) encodingCache {
	return encodingCache{entries: lru.New[cacheKey, *encoding](cacheBytes), requests: requests}
}

// get is what is kept, and whether it may still be used.
func (k encodingCache) get(key cacheKey, now time.Time) (e *encoding, fresh bool) {
	e, ok := k.entries.Get(key)
	return e, ok && now.Before(e.expires)
}

// lookup are items' encodings that are kept, each with a key that is k but for the item, and what is to be made.
func (k encodingCache) lookup(key cacheKey, items []*cache.Item) (all []*encoding, misses cacheMisses) {
	now := time.Now()
	all = make([]*encoding, len(items))
	for i, item := range items {
		key.serial = item.Serial
		var fresh bool
		if all[i], fresh = k.get(key, now); !fresh {
			misses.positions, misses.items = append(misses.positions, i), append(misses.items, item)
		}
	}
	k.requests.WithLabelValues("true").Add(float64(len(items) - len(misses.items)))
	k.requests.WithLabelValues("false").Add(float64(len(misses.items)))
	return all, misses
}

func (k encodingCache) put(key cacheKey, e *encoding) {
	k.entries.Put(key, e, len(e.data)+len(e.ages)*ageBytes+entryOverhead)
}

// cacheMisses is what registry is to be asked for: items, and where each one's encoding goes.
type cacheMisses struct {
	positions []int
	items     []*cache.Item
}

// nextBatch takes what one Encode call carries.
func (u *cacheMisses) nextBatch() (positions []int, items []*cache.Item) {
	n := BatchSize(u.items)
	positions, items = u.positions[:n], u.items[:n]
	u.positions, u.items = u.positions[n:], u.items[n:]
	return positions, items
}

// keyOf is the key of what is made in the form that q wants, but for what it is made of.
func (c *Converter) keyOf(q *query.Query) cacheKey {
	return cacheKey{encodingKey: unique.Make(q.EncodingKey), crdRevision: c.crdRevision(q)}
}

// crdRevision is where the resource's definition last changed, as far as the log and the catalog tell: a replica that has
// just begun has seen no change in the log.
func (c *Converter) crdRevision(q *query.Query) int64 {
	return max(c.cache.Resource(q.Entry.StorageResource).CRDChangedAt(), q.Entry.CrdRevision)
}
