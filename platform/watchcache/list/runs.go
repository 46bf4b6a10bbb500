package list

import (
	"hash/maphash"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/frame"
	"watershed.dev/platform/lru"
	"watershed.dev/platform/recovery"
	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/query"
)

// Clients request compressed lists, and compression costs several times as much as the rest of a list. A list is
// therefore divided into runs: consecutive items that are compressed together. A run is compressed once for all lists
// with the same encoding and the same items. A changed item invalidates only its own run and the next.
//
// Run boundaries are content-defined: they depend on the last item's key and size. A change elsewhere moves no
// boundary, except boundaries that exist because a run reached maxRunBytes. The boundaries depend on a secret seed.
// Clients therefore cannot choose names that prevent them.

const (
	// runBytes is about the uncompressed size of a run. maxRunBytes is the maximum, unless a single item is larger.
	runBytes    = 64 << 10
	maxRunBytes = 4 * runBytes
	// runTTL is how long a run stays cached without a request.
	runTTL = 10 * time.Minute
	// runOverhead is about the memory of a cached run beside its bytes. itemOverhead is the memory of each of its
	// items.
	runOverhead  = 700
	itemOverhead = 8
)

// runs caches the compressed runs.
type runs struct {
	// limit bounds the cache in bytes.
	limit int
	// seed determines the keys that end a run.
	seed uint64
	// headsSeed is the seed of the hash of rows' heads.
	headsSeed maphash.Seed
	// requests counts the requested runs by whether the cache had them.
	requests *prometheus.CounterVec
	// rows has the runs of Tables. Their ages make most of them useless soon, and they must not evict the other runs.
	objects, rows *lru.Cache[runKey, *run]
}

// rowsShare divides limit for the runs of Tables.
const rowsShare = 8

// cacheFor returns the cache of a run.
func (r *runs) cacheFor(key runKey) *lru.Cache[runKey, *run] {
	if key.heads != 0 {
		return r.rows
	}
	return r.objects
}

// forget evicts the runs that were not requested for the duration unused.
func (r *runs) forget(unused time.Duration) {
	r.objects.EvictIdle(unused)
	r.rows.EvictIdle(unused)
}

// bytes returns the size of both caches.
func (r *runs) bytes() int { return r.objects.Bytes() + r.rows.Bytes() }

// runKey identifies a run, except for hash collisions.
type runKey struct {
	encodingKey query.EncodingKey
	// head is the beginning of every item beside encodingKey: the kind of a custom resource.
	head string
	// sum hashes the items' serials. last is whether no item follows, because in JSON the last item has no comma.
	sum  uint64
	last bool
	// heads hashes the heads of a Table's rows, which include ages. Its seed is secret.
	heads uint64
}

// content is a list to divide into runs: its body, its items and their encoding.
type content struct {
	encodingKey query.EncodingKey
	items       []*cache.Item
	body        *frame.Body
}

// run is a cached run. part compresses it at the first call.
type run struct {
	serials []uint64
	part    func() (*deflate.Part, error)
}

func newRuns(limit int) *runs {
	return &runs{
		limit:     limit,
		seed:      rand.Uint64(),
		headsSeed: maphash.MakeSeed(),

		objects: lru.New[runKey, *run](limit - limit/rowsShare),
		rows:    lru.New[runKey, *run](limit / rowsShare),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_watchfanout_compressed_runs_total",
			Help: "Compressed runs of list items that were requested, by whether the cache had them.",
		}, []string{"cached"}),
	}
}

// end returns the end of the run that starts at the item first.
func (r *runs) end(c *content, first int) int {
	size := 0
	for i := first; i < len(c.items); i++ {
		n := c.body.ItemBytes(i)
		// on average, an item ends a run every runBytes bytes
		if size += n; size >= maxRunBytes || int(r.hash(c.items[i].Key)%runBytes) < n {
			return i + 1
		}
	}
	return len(c.items)
}

// hash returns the FNV-1a hash of a key, with the secret seed.
func (r *runs) hash(key string) uint64 {
	h := r.seed
	for i := range len(key) {
		h = (h ^ uint64(key[i])) * 0x100000001b3
	}
	return (h ^ h>>32) * 0x9e3779b97f4a7c15 >> 32 // mixes the last characters into all bits that remain
}

// part returns the compressed run of the items from first up to end.
func (r *runs) part(c *content, first, end int) (*deflate.Part, error) {
	key := runKey{encodingKey: c.encodingKey, head: string(c.body.Items.Head), last: end == len(c.items)}
	for _, i := range c.items[first:end] {
		key.sum = bits.RotateLeft64(key.sum^i.Serial, 31) * 0x9e3779b97f4a7c15
	}
	if heads := c.body.Items.Heads; heads != nil {
		var sum maphash.Hash
		sum.SetSeed(r.headsSeed)
		for _, head := range heads[first:end] {
			_, _ = sum.Write(head)
		}
		key.heads = sum.Sum64()
	}
	same := func(entry *run) bool { return entry.matches(c.items[first:end]) }
	store := r.cacheFor(key)
	entry, ok := store.Get(key)
	if ok = ok && same(entry); !ok {
		created := r.newRun(key, c, first, end)
		entry = store.PutUnless(key, same, created, created.overhead())
	}
	r.requests.WithLabelValues(strconv.FormatBool(ok)).Inc()
	return entry.part()
}

// newRun returns a run that its first caller compresses. Concurrent callers wait.
func (r *runs) newRun(key runKey, c *content, first, end int) *run {
	created := &run{serials: make([]uint64, end-first)}
	for i, item := range c.items[first:end] {
		created.serials[i] = item.Serial
	}
	created.part = sync.OnceValues(func() (part *deflate.Part, err error) {
		defer func() {
			// A run that compresses badly takes memory from runs that compress well, and compressing it again is as
			// fast as copying it.
			if err != nil || 2*int64(len(part.Data)) > part.Size {
				r.cacheFor(key).RemoveIf(key, func(entry *run) bool { return entry == created })
				return
			}
			replaced := func(entry *run) bool { return entry != created }
			r.cacheFor(key).PutUnless(key, replaced, created, created.overhead()+len(part.Data))
		}()
		defer recovery.ToError("compressing a list", &err)
		return deflate.Compress(c.body.Run(nil, first, end)...), nil
	})
	return created
}

// overhead returns the memory of the run beside its bytes.
func (r *run) overhead() int { return runOverhead + itemOverhead*len(r.serials) }

// matches reports whether the run consists of these items.
func (r *run) matches(items []*cache.Item) bool {
	return slices.EqualFunc(r.serials, items, func(serial uint64, i *cache.Item) bool { return serial == i.Serial })
}
