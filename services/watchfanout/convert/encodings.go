package convert

import (
	"sync"
	"time"

	"watershed.dev/services/watchfanout/cache"
	"watershed.dev/services/watchfanout/form"
)

// encodings remembers for a while what registry has made of objects: many ask for the same at once. It holds two
// generations; what was not asked for again goes with the older one.
type encodings struct {
	// An encoding lives from half of life to life.
	life time.Duration
	// limit bounds each generation, in bytes.
	limit int

	mu         sync.Mutex
	young, old map[encodingKey][]byte
	bytes      int
	timer      *time.Timer
}

type encodingKey struct {
	// item is nil for the columns of a Table.
	item *cache.Item
	form form.Key
}

const (
	// rowsLife is how long a Table's rows may be shown again. They tell ages, which are then at most so much too young.
	rowsLife = time.Second
	// versionsLife is how long other versions of objects are kept: they are as good as the object.
	versionsLife  = time.Minute
	encodingsSize = 32 << 20
)

func (e *encodings) get(k encodingKey) ([]byte, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if v, ok := e.young[k]; ok {
		return v, true
	}
	v, ok := e.old[k]
	return v, ok
}

func (e *encodings) put(k encodingKey, v []byte) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.bytes+len(v) > e.limit {
		return
	}
	if e.young == nil {
		e.young = map[encodingKey][]byte{}
	}
	e.young[k] = v
	e.bytes += len(v) + 200
	if e.timer == nil {
		e.timer = time.AfterFunc(e.life/2, e.age)
	}
}

// age lets the older generation go.
func (e *encodings) age() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.old, e.young, e.bytes = e.young, nil, 0
	e.timer = nil
	if e.old != nil {
		e.timer = time.AfterFunc(e.life/2, e.age)
	}
}
