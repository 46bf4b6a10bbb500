package conversion

import (
	"time"
	"unique"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/lru"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/query"
)

const (
	// CacheBytes bounds a replica's cache of rows, and again its cache of encodings as large as objects. The caches are
	// separate so that large encodings do not evict rows.
	CacheBytes = 64 << 20
	// entryOverhead is about the memory of a cached encoding beside its bytes. ageBytes is the memory of each age.
	entryOverhead = 300
	ageBytes      = 40
	// rowTTL is how long a row is used if its ages are recomputed. It is bounded because a later release of registry
	// may print another row.
	rowTTL = 10 * time.Minute
	// versionTTL is how long a converted object is used. It is bounded because a conversion webhook may begin to return
	// something else.
	versionTTL = time.Minute
	// shortTTL is how long a row is used if some of its ages are unknown: its ages are at most that much too young. It
	// also applies to a Table's columns, so that a change of release is detected.
	shortTTL = time.Second
)

// cacheKey identifies an encoding: the object and the encoding requested.
type cacheKey struct {
	// serial is the item's serial, or 0 for the columns of a Table.
	serial      uint64
	encodingKey unique.Handle[query.EncodingKey]
	// crdRevision is the last change of the resource's CRD that the replica had received.
	crdRevision int64
	// columns are the columns of a row's Table.
	columns unique.Handle[string]
}

// encoding is an encoding that registry returned.
type encoding struct {
	data []byte
	// ages are the cells in a row's data that are recomputed for each response.
	ages    []age
	expires time.Time
}

// encodingCache caches registry's encodings, because many clients request the same.
type encodingCache struct {
	entries *lru.Cache[cacheKey, *encoding]
	// requests counts the requested encodings by whether the cache had them.
	requests *prometheus.CounterVec
}

func newEncodingCache(bytes int, requests *prometheus.CounterVec) encodingCache {
	return encodingCache{entries: lru.New[cacheKey, *encoding](bytes), requests: requests}
}

// get returns the cached encoding, and whether it has not expired.
func (k encodingCache) get(key cacheKey, now time.Time) (e *encoding, fresh bool) {
	e, ok := k.entries.Get(key)
	return e, ok && now.Before(e.expires)
}

// lookup returns the cached encodings of items, and the items without one. Each item's key is key with the item's
// serial.
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

// cacheMisses lists the items to request from registry, and the positions of their encodings.
type cacheMisses struct {
	positions []int
	items     []*cache.Item
}

// nextBatch removes and returns the items of the next Encode call.
func (u *cacheMisses) nextBatch() (positions []int, items []*cache.Item) {
	n := BatchSize(u.items)
	positions, items = u.positions[:n], u.items[:n]
	u.positions, u.items = u.positions[n:], u.items[n:]
	return positions, items
}

// keyOf returns the cache key of q's encoding, without an item's serial.
func (c *Converter) keyOf(q *query.Query) cacheKey {
	return cacheKey{encodingKey: unique.Make(q.EncodingKey), crdRevision: c.crdRevision(q)}
}

// crdRevision returns the revision of the CRD's last change, from the log or from discovery. A replica that has just
// started has received no change in the log.
func (c *Converter) crdRevision(q *query.Query) int64 {
	return max(c.cache.Resource(q.Entry.StorageResource).CRDChangedAt(), q.Entry.CrdRevision)
}
