package lists

import (
	"container/list"
	"hash/maphash"
	"math/bits"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/frame"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/form"
)

// Clients ask for lists compressed, and compressing costs several times what all the rest of a list does. So a list is
// made of runs: some items that follow each other, compressed by themselves. A run is compressed once, for every list in
// one form that has those items; what changes is compressed anew with the few that are its neighbours. Where runs end
// depends on each item's key and size alone: what comes and goes elsewhere moves no other run's end.

const (
	// runBytes is about how many bytes of a body a run has, before it is compressed, and mostRunBytes how many at most,
	// but for one item that is larger.
	runBytes     = 64 << 10
	mostRunBytes = 4 * runBytes
	// runLife is how long a run is kept that nobody asks for.
	runLife = 10 * time.Minute
	// runOverhead is about what keeping a run takes beside its bytes, and itemOverhead what each of its items adds.
	runOverhead  = 300
	itemOverhead = 8
)

// runs keeps what runs are, compressed.
type runs struct {
	// limit is how many bytes are kept.
	limit int
	seed  maphash.Seed
	// asked counts runs by whether they were kept.
	asked *prometheus.CounterVec

	mu    sync.Mutex
	kept  map[runKey]*list.Element
	order list.List // of *run, the last asked for in front
	bytes int
}

// runKey tells runs apart, but for a collision of sums.
type runKey struct {
	form form.Key
	// sum is of the items' serials, and last whether no item follows: in JSON that takes a comma away.
	sum  uint64
	last bool
}

// run is one that is kept, or on its way to be.
type run struct {
	key     runKey
	serials []uint64
	part    func() (*deflate.Part, error)
	bytes   int
	used    time.Time
}

func newRuns(limit int) *runs {
	return &runs{
		limit: limit,
		seed:  maphash.MakeSeed(),
		kept:  map[runKey]*list.Element{},
		asked: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_watchfanout_compressed_runs_total",
			Help: "Runs of lists' items that were asked for compressed, by whether they were kept so.",
		}, []string{"kept"}),
	}
}

// end is where the run ends that begins with the item at first.
func (r *runs) end(items []*cache.Item, body *frame.Body, first int) int {
	size := 0
	for i := first; i < len(items); i++ {
		n := body.ItemBytes(i)
		// one item in so many ends a run, for items of n bytes
		if size += n; size >= mostRunBytes || int(maphash.String(r.seed, items[i].Key)%runBytes) < n {
			return i + 1
		}
	}
	return len(items)
}

// part is the run of some items, from first up to end, compressed.
func (r *runs) part(q *form.Query, items []*cache.Item, body *frame.Body, first, end int) (*deflate.Part, error) {
	key := runKey{form: q.Key, last: end == len(items)}
	for _, i := range items[first:end] {
		key.sum = bits.RotateLeft64(key.sum^i.Serial, 31) * 0x9e3779b97f4a7c15
	}
	r.mu.Lock()
	e, ok := r.kept[key]
	if ok && e.Value.(*run).of(items[first:end]) {
		r.order.MoveToFront(e)
		kept := e.Value.(*run)
		kept.used = time.Now()
		r.mu.Unlock()
		r.asked.WithLabelValues("true").Inc()
		return kept.part()
	}
	if ok {
		r.drop(e)
	}
	made := &run{key: key, serials: make([]uint64, end-first), used: time.Now()}
	for i, item := range items[first:end] {
		made.serials[i] = item.Serial
	}
	made.part = sync.OnceValues(func() (*deflate.Part, error) { // the others who want it wait
		p, err := deflate.Compress(body.Run(nil, first, end)...)
		if err == nil {
			r.account(made, len(p.Data))
		}
		return p, err
	})
	r.kept[key] = r.order.PushFront(made)
	r.mu.Unlock()
	r.asked.WithLabelValues("false").Inc()
	r.account(made, runOverhead+itemOverhead*len(made.serials))
	return made.part()
}

// of says whether the run is of these items.
func (r *run) of(items []*cache.Item) bool {
	if len(r.serials) != len(items) {
		return false
	}
	for i, item := range items {
		if r.serials[i] != item.Serial {
			return false
		}
	}
	return true
}

// account counts bytes of a run that is still kept, and lets go of what was not asked for longest.
func (r *runs) account(of *run, bytes int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if e, ok := r.kept[of.key]; !ok || e.Value.(*run) != of {
		return
	}
	of.bytes += bytes
	r.bytes += bytes
	for r.bytes > r.limit {
		r.drop(r.order.Back())
	}
}

// drop forgets a run. The lock is held.
func (r *runs) drop(e *list.Element) {
	old := r.order.Remove(e).(*run)
	r.bytes -= old.bytes
	delete(r.kept, old.key)
}

// sweep forgets what nobody has asked for lately.
func (r *runs) sweep() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for e := r.order.Back(); e != nil && time.Since(e.Value.(*run).used) >= runLife; e = r.order.Back() {
		r.drop(e)
	}
}

func (r *runs) held() float64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return float64(r.bytes)
}
