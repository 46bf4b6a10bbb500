package cache

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
	"weak"

	"github.com/klauspost/compress/zstd"

	"watershed.dev/platform/deflate"
)

// Clients do not change or list most objects of a cluster for hours. Sweep therefore packs the encodings of objects
// that have not changed for packPeriod: neighbours are compressed together, in JSON and in protobuf each. A reader
// unpacks a pack for all readers, until the pack has had no reader for packPeriod.
//
// A character of an object can take six bytes of JSON, such as "\u003c" for "<". maxGrowth therefore bounds the bytes
// of written objects, and of each load, that wait to be packed. maxUnpackedBytes bounds the bytes that readers have
// unpacked. Bytes that do not compress (compressibleShare) have no bound but etcd's quota.

const (
	// packPeriod is about how often Sweep packs objects. An object is packed at the second call of packOlder after its
	// last change. Unpacked bytes are dropped at Sweep's second call of dropUnread after their last reader.
	packPeriod = 30 * time.Second
	// maxGrowth is the number of bytes of written objects above which PackGrowth packs. Up to twice as many wait for
	// it. It is also the number of bytes of a load that wait. 10,000 pods have less, so that the first lists of most
	// clusters after a start unpack nothing.
	maxGrowth = 256 << 20
	// maxUnpackedBytes bounds the unpacked bytes that a cache keeps for further readers: 30,000 pods in an encoding.
	maxUnpackedBytes = 512 << 20
	// packBytes is about the size of a pack's encodings. A GET of a packed object decompresses so many bytes. A pack
	// has more only if it has a single object.
	packBytes = 128 << 10
	// windowBytes is how far back an encoder finds equal bytes. Its buffers are about as large: 8 MB by default.
	windowBytes = 2 * packBytes
	// minPackBytes is the size below which encodings are not packed.
	minPackBytes = 8 << 10
	// sparseShare divides the bytes of a pack: a pack whose remaining objects have fewer bytes is packed again.
	sparseShare = 2
	// compressibleShare divides the bytes of a pack: encodings that do not compress to so few bytes are not packed.
	compressibleShare = 2
)

// encoding is the bytes of an object in JSON or in protobuf. It does not change.
type encoding struct {
	// own are the bytes, unless pack has them from offset on.
	own    []byte
	pack   *pack
	offset uint32
	size   uint32
	// encoder identifies the registry's encoder (Row.encoder of registry's contract).
	encoder uint32
	// incompressible encodings are not packed.
	incompressible bool
}

func ownEncoding(data []byte, encoder uint32) *encoding {
	return &encoding{own: data, size: uint32(len(data)), encoder: encoder}
}

// bytes returns the bytes, and unpacks them if necessary. nil is an empty encoding.
func (e *encoding) bytes() []byte {
	switch {
	case e == nil:
		return nil
	case e.pack == nil:
		return e.own
	}
	return e.of(e.pack.read())
}

// peek returns the bytes for a moment, and does not keep a pack unpacked.
func (e *encoding) peek() []byte {
	if e == nil || e.pack == nil {
		return e.bytes()
	}
	return e.of(e.pack.peek())
}

// of returns the bytes in the unpacked bytes of the pack.
func (e *encoding) of(unpacked []byte) []byte {
	end := e.offset + e.size
	return unpacked[e.offset:end:end]
}

func (e *encoding) len() int {
	if e == nil {
		return 0
	}
	return int(e.size)
}

// decoder decompresses packs, for any number of callers.
var decoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderLowmem(true))
	if err != nil {
		panic(err) // the options are invalid
	}
	return d
})

// newEncoder returns an encoder of packs. Its level, the fastest of zstd, makes different pods ten times smaller. It
// decompresses nearly as fast as s2, which makes them six times smaller.
func newEncoder() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithWindowSize(windowBytes), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic(err) // the options are invalid
	}
	return e
}

// pack holds the encodings of neighbouring objects, compressed.
type pack struct {
	compressed []byte
	size       int
	// list has the pack while unpacked is set.
	list *unpackedPacks
	// unpacked is nil until a reader needs it, and again after the drop. The bytes are a single allocation, which each
	// slice of them keeps in memory.
	unpacked atomic.Pointer[[]byte]
	// wasRead reports a reader since the last call of dropUnread.
	wasRead atomic.Bool

	mu sync.Mutex // guards the field below, and unpacks once for concurrent readers
	// held are the bytes that were last unpacked for a reader. A slow client may still hold them.
	held weak.Pointer[byte]
}

// read returns the unpacked bytes, and keeps them for further readers. There are never two copies of them, so that slow
// clients hold no more bytes than the objects have.
func (p *pack) read() []byte {
	if !p.wasRead.Load() {
		p.wasRead.Store(true)
	}
	if unpacked := p.unpacked.Load(); unpacked != nil {
		return *unpacked
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	unpacked := p.unpack()
	if p.unpacked.Load() == nil { // otherwise another reader has unpacked them meanwhile
		p.held = weak.Make(&unpacked[0])
		p.unpacked.Store(&unpacked) // before add, after which add of another pack may drop the bytes
		p.list.add(p)
	}
	return unpacked
}

// peek returns the unpacked bytes for a moment, and does not keep them.
func (p *pack) peek() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unpack()
}

// unpack returns the unpacked bytes. The caller holds mu. unpack panics if the bytes are corrupt: the memory of the
// process is then unreliable.
func (p *pack) unpack() []byte {
	if unpacked := p.unpacked.Load(); unpacked != nil {
		return *unpacked
	}
	if held := p.held.Value(); held != nil {
		return unsafe.Slice(held, p.size)
	}
	unpacked, err := decoder().DecodeAll(p.compressed, make([]byte, 0, p.size))
	if err != nil || len(unpacked) != p.size {
		panic(fmt.Sprintf("packed objects of %d bytes are corrupt in memory: %d bytes, %v", p.size, len(unpacked), err))
	}
	return unpacked
}

// dropUnread drops the unpacked bytes, and returns true, if there has been no reader since the last call.
func (p *pack) dropUnread() bool {
	if p.wasRead.Swap(false) {
		return false
	}
	p.unpacked.Store(nil)
	return true
}

// unpackedPacks are the packs of a cache whose unpacked bytes are set. Some may belong to no object of the cache any
// more, but to a snapshot or to a watch that waits for its client.
type unpackedPacks struct {
	maxBytes int

	mu    sync.Mutex
	all   []*pack
	bytes int // of all
}

// add adds a pack. If the packs then have more than maxBytes, it drops the bytes of random packs, so that no client
// keeps all room for its objects.
func (l *unpackedPacks) add(p *pack) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all, l.bytes = append(l.all, p), l.bytes+p.size
	for l.bytes > l.maxBytes {
		n, last := rand.IntN(len(l.all)), len(l.all)-1
		l.bytes -= l.all[n].size
		l.all[n].unpacked.Store(nil)
		l.all[n], l.all[last] = l.all[last], nil
		l.all = l.all[:last]
	}
}

// dropUnread calls dropUnread of each pack.
func (l *unpackedPacks) dropUnread() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = slices.DeleteFunc(l.all, func(p *pack) bool {
		if !p.dropUnread() {
			return false
		}
		l.bytes -= p.size
		return true
	})
}

// packUnchanged calls packOlder each packPeriod, and drops the unpacked bytes without readers. It does nothing if it is
// called earlier. Only the goroutine of Sweep calls it.
func (c *Cache) packUnchanged(now time.Time) {
	const early = packPeriod / 10 // callers with the same period are sometimes early
	if now.Sub(c.packedAt) < packPeriod-early {
		return
	}
	c.packedAt = now
	c.unpacked.dropUnread()
	c.packOlder()
}

// PackGrowth packs objects if more than maxGrowth bytes were written since objects were last packed. Only the goroutine
// of Sweep calls it.
func (c *Cache) PackGrowth() {
	if c.growth.Load() > int64(c.maxGrowth) {
		c.packOlder()
	}
}

// packOlder packs the objects that are older than its last call, and drops the frames of events that are older.
func (c *Cache) packOlder() {
	c.growth.Store(0) // first, so that bytes that arrive meanwhile count twice rather than not at all
	upTo := c.packUpTo
	c.packUpTo = lastSerial.Load()
	// Most calls pack nothing, and an encoder has megabytes.
	p := packer{upTo: upTo, encoder: sync.OnceValue(newEncoder), turn: deflate.Turn}
	c.each(func(r *Resource) {
		sizes := c.packItems(r.packable(upTo), p)
		r.packed.Store(&sizes)
	})
}

// packItems packs both encodings of items, and returns the bytes of all their packs.
func (c *Cache) packItems(items []*Item, p packer) (sizes packedSizes) {
	p.unpacked = &c.unpacked
	for _, of := range []func(*Item) *atomic.Pointer[encoding]{
		func(i *Item) *atomic.Pointer[encoding] { return &i.json },
		func(i *Item) *atomic.Pointer[encoding] { return &i.protobuf },
	} {
		p.of = of
		p.packAll(items)
		sizes.add(p.live(items))
	}
	return sizes
}

// packedSizes are the bytes of a resource's packs: before and after compression, and the unpacked bytes in memory.
type packedSizes struct{ original, compressed, unpacked int }

func (s *packedSizes) add(live map[*pack]int) {
	for p := range live {
		s.original += p.size
		s.compressed += len(p.compressed)
		if p.unpacked.Load() != nil {
			s.unpacked += p.size
		}
	}
}

// packable returns the objects and the objects of the recent events, and drops the frames of the events up to a serial:
// watches without delay have read them.
func (r *Resource) packable(upTo uint64) (items []*Item) {
	r.mu.Lock()
	events := r.events.All()
	var objects *Snapshot
	if r.tree != nil {
		objects = r.currentSnapshot("")
	}
	r.mu.Unlock()
	for _, e := range events {
		if e.Item.Serial > upTo {
			break
		}
		e.dropFrames()
	}
	if objects != nil {
		items = make([]*Item, 0, objects.Len()+len(events))
		objects.scan("", "", func(i *Item) bool { items = append(items, i); return true })
	}
	for _, e := range events {
		if objects != nil {
			if current, found := objects.Get(e.Item.Key); found && current == e.Item {
				continue
			}
		}
		items = append(items, e.Item)
		if e.Previous != nil {
			items = append(items, e.Previous)
		}
	}
	return items
}

// packer packs an encoding of the objects of a resource: JSON or protobuf.
type packer struct {
	// upTo is the serial of the youngest object to pack.
	upTo    uint64
	encoder func() *zstd.Encoder
	// turn calls a function when it is its turn to compress.
	turn func(func() error) error

	of       func(*Item) *atomic.Pointer[encoding]
	unpacked *unpackedPacks
}

// noTurn is a turn without a wait.
func noTurn(work func() error) error { return work() }

// live returns the packs of items, with the bytes that items have of each. Snapshots and watches may have further
// packs, which stay as they are.
func (p *packer) live(items []*Item) map[*pack]int {
	live := map[*pack]int{}
	for _, i := range items {
		if e := p.of(i).Load(); e != nil && e.pack != nil {
			live[e.pack] += int(e.size)
		}
	}
	return live
}

func (p *packer) packAll(items []*Item) {
	p.unpackSparse(items)
	var group []*Item
	size := 0
	for _, i := range items {
		e := p.of(i).Load()
		if e.len() == 0 || e.pack != nil || e.incompressible || i.Serial > p.upTo {
			continue
		}
		if size+e.len() > packBytes && len(group) > 0 {
			p.packGroup(group, size)
			group, size = group[:0], 0
		}
		group, size = append(group, i), size+e.len()
	}
	p.packGroup(group, size)
}

// unpackSparse gives the objects of sparse packs their own bytes, so that they are packed with others.
func (p *packer) unpackSparse(items []*Item) {
	live := p.live(items)
	sparse := map[*pack][]*Item{}
	for _, i := range items {
		if e := p.of(i).Load(); e != nil && e.pack != nil && live[e.pack] < e.pack.size/sparseShare {
			sparse[e.pack] = append(sparse[e.pack], i)
		}
	}
	for pack, remaining := range sparse {
		_ = p.turn(func() error {
			unpacked := pack.peek()
			for _, i := range remaining {
				if e := p.of(i).Load(); e.pack == pack {
					p.of(i).Store(ownEncoding(bytes.Clone(e.of(unpacked)), e.encoder))
				}
			}
			return nil
		})
	}
}

// packGroup packs the encodings of items, which have size bytes. It takes a turn.
func (p *packer) packGroup(items []*Item, size int) {
	if size < minPackBytes {
		return
	}
	_ = p.turn(func() error { p.compress(items, size); return nil })
}

func (p *packer) compress(items []*Item, size int) {
	all := make([]byte, 0, size)
	encodings := make([]encoding, len(items)) // a single allocation for all
	for n, i := range items {
		e := p.of(i).Load()
		encodings[n] = encoding{offset: uint32(len(all)), size: e.size, encoder: e.encoder}
		all = append(all, e.own...)
	}
	compressed := p.encoder().EncodeAll(all, nil)
	if len(compressed) > size/compressibleShare {
		for _, i := range items {
			// Smaller objects may have large neighbours that do not compress. They are packed without them.
			if e := p.of(i).Load(); e.len() >= size/len(items) {
				own := ownEncoding(e.own, e.encoder)
				own.incompressible = true
				p.of(i).Store(own)
			}
		}
		return
	}
	whole := &pack{compressed: bytes.Clone(compressed), size: size, list: p.unpacked} // without unused capacity
	for n, i := range items {
		encodings[n].pack = whole
		p.of(i).Store(&encodings[n])
	}
}
