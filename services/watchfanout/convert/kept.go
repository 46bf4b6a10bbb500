package convert

import (
	"time"
	"unique"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/lru"
	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/form"
)

const (
	// keptBytes bounds what is kept of rows, and again of what is as large as objects: it is not to take their room.
	keptBytes = 64 << 20
	// keptOverhead is about what keeping one encoding takes beside its bytes, and ageBytes what each of its ages adds.
	keptOverhead = 300
	ageBytes     = 40
	// rowLife is how long a row may be used whose ages are told anew. It has an end since a later release of registry
	// may print another one.
	rowLife = 10 * time.Minute
	// versionLife is how long another version of an object may be used: a webhook that converts may come to make
	// another.
	versionLife = time.Minute
	// shortLife is how long a row may be used whose ages are not all known: what it tells is at most so much too young.
	// So it is with a Table's columns, by which a change of release is noticed.
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
	ages  []age
	until time.Time
}

// kept remembers what registry has made of objects: many ask for the same.
type kept struct {
	made *lru.Cache[key, *encoding]
	// asked counts encodings by whether they were kept.
	asked *prometheus.CounterVec
}

func newKept(asked *prometheus.CounterVec) kept {
	return kept{made: lru.New[key, *encoding](keptBytes), asked: asked}
}

// get is what is kept, and whether it may still be used.
func (k kept) get(key key, now time.Time) (e *encoding, fresh bool) {
	e, ok := k.made.Get(key)
	return e, ok && now.Before(e.until)
}

// find are items' encodings that are kept, each with a key that is k but for the item, and what is to be made.
func (k kept) find(key key, items []*cache.Item) (all []*encoding, todo unmade) {
	now := time.Now()
	all = make([]*encoding, len(items))
	for i, item := range items {
		key.serial = item.Serial
		var fresh bool
		if all[i], fresh = k.get(key, now); !fresh {
			todo.at, todo.items = append(todo.at, i), append(todo.items, item)
		}
	}
	k.asked.WithLabelValues("true").Add(float64(len(items) - len(todo.items)))
	k.asked.WithLabelValues("false").Add(float64(len(todo.items)))
	return all, todo
}

func (k kept) put(key key, e *encoding) {
	k.made.Put(key, e, len(e.data)+len(e.ages)*ageBytes+keptOverhead)
}

// unmade is what registry is to be asked for: items, and where each one's encoding goes.
type unmade struct {
	at    []int
	items []*cache.Item
}

// next takes what one Encode call carries.
func (u *unmade) next() (at []int, items []*cache.Item) {
	n := Batch(u.items)
	at, items = u.at[:n], u.items[:n]
	u.at, u.items = u.at[n:], u.items[n:]
	return at, items
}

// keyOf is the key of what is made in the form that q wants, but for what it is made of.
func (c *Converter) keyOf(q *form.Query) key {
	return key{form: unique.Make(q.Key), defined: c.definedAt(q)}
}

// definedAt is where the resource's definition last changed, as far as the log and the catalog tell: a replica that has
// just begun has seen no change in the log.
func (c *Converter) definedAt(q *form.Query) int64 {
	return max(c.cache.Resource(q.Entry.StorageResource).Redefined(), q.Entry.CrdRevision)
}
