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
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/query"
)

// Clients ask for lists compressed, and compressing costs several times what all the rest of a list does. So a list is
// made of runs: some items that follow each other, compressed by themselves. A run is compressed once, for every list
// in one form that has those items; what changes is compressed anew with the few that are its neighbours. Where a run
// ends depends on the key and the size of the item that it ends with, so what comes and goes elsewhere moves no end but
// those few that are there since a run has become too long. Which keys end one nobody outside knows: names cannot be
// chosen so that none does.

const (
	// runBytes is about how many bytes of a body a run has, before it is compressed, and maxRunBytes how many at most,
	// but for one item that is larger.
	runBytes    = 64 << 10
	maxRunBytes = 4 * runBytes
	// runTTL is how long a run is kept that nobody asks for.
	runTTL = 10 * time.Minute
	// runOverhead is about what keeping a run takes beside its bytes, and itemOverhead what each of its items adds.
	runOverhead  = 700
	itemOverhead = 8
)

// runs keeps what runs are, compressed.
type runs struct {
	// limit is how many bytes are kept.
	limit int
	// seed decides which keys end a run.
	seed uint64
	// headsSeed is that of rows' heads.
	headsSeed maphash.Seed
	// requests counts runs by whether they were kept.
	requests *prometheus.CounterVec
	// rows are those of Tables, which tell ages: most are soon of no use, and are not to take the others' room.
	objects, rows *lru.Cache[runKey, *run]
}

// rowsShare is what part of what is kept is of Tables.
const rowsShare = 8

// cacheFor is where a run is kept.
func (r *runs) cacheFor(key runKey) *lru.Cache[runKey, *run] {
	if key.heads != 0 {
		return r.rows
	}
	return r.objects
}

// forget forgets what nobody has asked for for some time.
func (r *runs) forget(unused time.Duration) {
	r.objects.EvictIdle(unused)
	r.rows.EvictIdle(unused)
}

// bytes is how much is kept.
func (r *runs) bytes() int { return r.objects.Bytes() + r.rows.Bytes() }

// runKey tells runs apart, but for a collision of sums.
type runKey struct {
	encodingKey query.EncodingKey
	// head is what items begin with beside that: a custom resource's kind.
	head string
	// sum is of the items' serials, and last whether no item follows: in JSON that takes a comma away.
	sum  uint64
	last bool
	// heads are what rows of a Table begin with, which tells ages: a sum by a seed of this process' own.
	heads uint64
}

// content is a list's, as runs are made of it: a body that is made of items in a form.
type content struct {
	encodingKey query.EncodingKey
	items       []*cache.Item
	body        *frame.Body
}

// run is one that is kept, or on its way to be.
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
			Help: "Runs of lists' items that were asked for compressed, by whether they were kept so.",
		}, []string{"cached"}),
	}
}

// end is where the run ends that begins with the item at first.
func (r *runs) end(c *content, first int) int {
	size := 0
	for i := first; i < len(c.items); i++ {
		n := c.body.ItemBytes(i)
		// one item in so many ends a run, for items of n bytes
		if size += n; size >= maxRunBytes || int(r.hash(c.items[i].Key)%runBytes) < n {
			return i + 1
		}
	}
	return len(c.items)
}

// hash is a key's FNV-1a with a beginning of this process' own.
func (r *runs) hash(key string) uint64 {
	h := r.seed
	for i := range len(key) {
		h = (h ^ uint64(key[i])) * 0x100000001b3
	}
	return (h ^ h>>32) * 0x9e3779b97f4a7c15 >> 32 // the last letters count for all of what is left
}

// part is the run of some items, from first up to end, compressed.
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

// newRun is a run that is compressed when it is first asked for; others who want it wait.
func (r *runs) newRun(key runKey, c *content, first, end int) *run {
	created := &run{serials: make([]uint64, end-first)}
	for i, item := range c.items[first:end] {
		created.serials[i] = item.Serial
	}
	created.part = sync.OnceValues(func() (part *deflate.Part, err error) {
		defer func() {
			// what compresses badly takes the room of much that does not, and is made again as fast as copied
			if err != nil || 2*int64(len(part.Data)) > part.Size {
				r.cacheFor(key).RemoveIf(key, func(entry *run) bool { return entry == created })
				return
			}
			replaced := func(entry *run) bool { return entry != created }
			r.cacheFor(key).PutUnless(key, replaced, created, created.overhead()+len(part.Data))
		}()
		defer recovery.ToError("compressing a list", &err)
		return deflate.Compress(c.body.Run(nil, first, end)...)
	})
	return created
}

// overhead is what keeping the run takes beside its bytes.
func (r *run) overhead() int { return runOverhead + itemOverhead*len(r.serials) }

// matches says whether the run is of these items.
func (r *run) matches(items []*cache.Item) bool {
	return slices.EqualFunc(r.serials, items, func(serial uint64, i *cache.Item) bool { return serial == i.Serial })
}
