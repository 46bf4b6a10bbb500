package convert

import (
	"time"
	"unique"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/lru"
	"watershed.dev/services/watchfanout/form"
)

const (
	// keptBytes bounds what is kept of what registry has made.
	keptBytes = 64 << 20
	// keptOverhead is about what keeping one encoding takes beside its bytes, and ageBytes what each of its ages adds.
	keptOverhead = 300
	ageBytes     = 40
	// life is how long an encoding may be used that is as good as its object. It has an end since a later release of
	// registry may make another.
	life = 10 * time.Minute
	// shortLife is how long one may be used that follows the clock: what it tells is at most so much too young. So it
	// is with a Table's columns, by which a change of release is noticed.
	shortLife = time.Second
)

// key is what registry was asked to encode, and in which form.
type key struct {
	// serial is the item's, and 0 for the columns of a Table.
	serial uint64
	form   unique.Handle[form.Key]
	// defined is where the resource's definition last changed, as the replica knew when it asked.
	defined int64
	// columns are those of a row's Table.
	columns unique.Handle[string]
}

// encoding is what registry has made.
type encoding struct {
	data []byte
	// ages are the parts of a row's data that are told anew each time.
	ages []age
	// columns are a Table's.
	columns unique.Handle[string]
	until   time.Time
}

// kept remembers what registry has made of objects: many ask for the same.
type kept struct {
	*lru.Cache[key, *encoding]

	// asked counts encodings by whether they were kept.
	asked *prometheus.CounterVec
}

func newKept() kept {
	return kept{
		Cache: lru.New[key, *encoding](keptBytes),
		asked: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "watershed_watchfanout_encodings_total",
			Help: "Objects asked for as Table rows and in other versions, by whether what registry made was kept.",
		}, []string{"kept"}),
	}
}

// count counts so many encodings that were asked for, of which some are to be made.
func (k kept) count(asked, missing int) {
	k.asked.WithLabelValues("true").Add(float64(asked - missing))
	k.asked.WithLabelValues("false").Add(float64(missing))
}

// get is what is kept and may still be used.
func (k kept) get(key key, now time.Time) (*encoding, bool) {
	e, ok := k.Get(key)
	return e, ok && now.Before(e.until)
}

func (k kept) put(key key, e *encoding) {
	k.Put(key, e, len(e.data)+len(e.ages)*ageBytes+keptOverhead)
}

// keyOf is the key of what is made in the form that q wants, but for what it is made of.
func (c *Converter) keyOf(q *form.Query) key {
	return key{form: unique.Make(q.Key), defined: c.cache.Resource(q.Entry.StoredAs).Redefined()}
}
