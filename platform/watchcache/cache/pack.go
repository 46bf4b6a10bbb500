package cache

import (
	"bytes"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"
	"weak"

	"github.com/klauspost/compress/zstd"
)

// Clients do not change or list most objects of a cluster for hours. Sweep therefore packs the encodings of objects
// that have not changed for packPeriod: neighbours are compressed together, in JSON and in protobuf each. A reader
// unpacks a pack for all readers, until the pack has had no reader for packPeriod.

const (
	// packPeriod is how long an object must not have changed before it is packed. It is also how long unpacked bytes
	// stay in memory without a reader.
	packPeriod = 30 * time.Second
	// packBytes is about the size of a pack's encodings. A GET of a packed object decompresses so many bytes. A pack
	// has more only if it has a single object.
	packBytes = 128 << 10
	// minPackBytes is the size below which encodings are not packed.
	minPackBytes = 8 << 10
	// sparseShare divides the bytes of a pack: a pack whose remaining objects have fewer bytes is packed again.
	sparseShare = 2
)

// encoding is the bytes of an object in JSON or in protobuf. It does not change.
type encoding struct {
	// own are the bytes, unless pack has them from offset on.
	own    []byte
	pack   *pack
	offset uint32
	size   uint32
	// incompressible encodings are not packed.
	incompressible bool
}

func ownEncoding(data []byte) *encoding { return &encoding{own: data, size: uint32(len(data))} }

// bytes returns the bytes, and unpacks them if necessary. nil is an empty encoding.
func (e *encoding) bytes() []byte {
	if e == nil || e.pack == nil {
		return e.ownBytes()
	}
	return e.of(e.pack.read())
}

func (e *encoding) ownBytes() []byte {
	if e == nil {
		return nil
	}
	return e.own
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

// The fastest level of zstd makes different pods ten times smaller. It decompresses nearly as fast as s2, which makes
// them six times smaller.
var decoder = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderLowmem(true))
	if err != nil {
		panic(err) // the options are invalid
	}
	return d
})

func newEncoder() *zstd.Encoder {
	e, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1))
	if err != nil {
		panic(err) // the options are invalid
	}
	return e
}

// pack holds the encodings of neighbouring objects, compressed.
type pack struct {
	compressed []byte
	size       int
	// unpacked is nil until a reader needs it, and again after packPeriod without readers.
	unpacked atomic.Pointer[[]byte]
	// wasRead reports a reader since the last call of release.
	wasRead atomic.Bool

	mu sync.Mutex // guards the field below, and unpacks once for concurrent readers
	// released are the bytes that release has dropped. A slow client may still hold them.
	released weak.Pointer[byte]
}

// read returns the unpacked bytes, and keeps them for further readers.
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
	p.unpacked.Store(&unpacked)
	return unpacked
}

// unpack returns the unpacked bytes. There are never two copies of them, so that slow clients pin no more bytes than
// the objects have. The caller holds mu. unpack panics if the bytes are corrupt: the memory of the process is then
// unreliable.
func (p *pack) unpack() []byte {
	if unpacked := p.unpacked.Load(); unpacked != nil {
		return *unpacked
	}
	if held := p.released.Value(); held != nil {
		return unsafe.Slice(held, p.size)
	}
	unpacked, err := decoder().DecodeAll(p.compressed, make([]byte, 0, p.size))
	if err != nil || len(unpacked) != p.size {
		panic(fmt.Sprintf("packed objects of %d bytes are corrupt in memory: %d bytes, %v", p.size, len(unpacked), err))
	}
	return unpacked
}

// release drops the unpacked bytes if there has been no reader since the last call.
func (p *pack) release() {
	if p.wasRead.Swap(false) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if unpacked := p.unpacked.Load(); unpacked != nil {
		p.released = weak.Make(&(*unpacked)[0])
		p.unpacked.Store(nil)
	}
}

// pack packs the objects that have not changed for packPeriod, and drops unpacked bytes and frames without readers.
// Only the goroutine of Sweep calls it.
func (c *Cache) pack(now time.Time) {
	if now.Sub(c.packedAt) < packPeriod {
		return
	}
	upTo := c.packUpTo
	c.packedAt, c.packUpTo = now, lastSerial.Load()
	encoder := sync.OnceValue(newEncoder) // most calls pack nothing, and an encoder has megabytes
	c.each(func(r *Resource) {
		items := r.packable(upTo)
		compressed, uncompressed := 0, 0
		for _, of := range []func(*Item) *atomic.Pointer[encoding]{
			func(i *Item) *atomic.Pointer[encoding] { return &i.json },
			func(i *Item) *atomic.Pointer[encoding] { return &i.protobuf },
		} {
			p := &packer{upTo: upTo, of: of, live: map[*pack]int{}, encoder: encoder}
			p.pack(items)
			for packed := range p.live {
				compressed, uncompressed = compressed+len(packed.compressed), uncompressed+packed.size
			}
		}
		r.compressedBytes.Store(int64(compressed))
		r.uncompressedBytes.Store(int64(uncompressed))
	})
}

// packable returns the objects and the objects of the recent events, and drops the frames of the events up to a serial:
// watches without delay have read them.
func (r *Resource) packable(upTo uint64) (items []*Item) {
	r.mu.Lock()
	events := r.events.All()
	for _, e := range events {
		if e.Item.Serial > upTo {
			break
		}
		r.addBytes(-int64(e.dropFrames()))
	}
	var objects *Snapshot
	if r.tree != nil {
		objects = r.currentSnapshot("")
	}
	r.mu.Unlock()
	if objects != nil {
		items = make([]*Item, 0, objects.Len()+len(events))
		objects.Scan("", "", func(i *Item) bool { items = append(items, i); return true })
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
	upTo uint64
	of   func(*Item) *atomic.Pointer[encoding]
	// live has the bytes of each pack that objects still have.
	live    map[*pack]int
	encoder func() *zstd.Encoder
}

func (p *packer) pack(items []*Item) {
	for _, i := range items {
		if e := p.of(i).Load(); e != nil && e.pack != nil {
			p.live[e.pack] += int(e.size)
		}
	}
	var run []*Item
	size := 0
	for _, i := range items {
		e := p.of(i).Load()
		if !p.mayPack(i, e) {
			continue
		}
		if size+e.len() > packBytes && len(run) > 0 {
			p.packRun(run, size)
			run, size = run[:0], 0
		}
		run, size = append(run, i), size+e.len()
	}
	p.packRun(run, size)
	for pack, live := range p.live {
		if pack.release(); live < pack.size/sparseShare {
			delete(p.live, pack) // replaced
		}
	}
}

// mayPack reports whether an encoding is to be packed, or packed again because its pack is sparse.
func (p *packer) mayPack(i *Item, e *encoding) bool {
	if e.len() == 0 || e.incompressible || i.Serial > p.upTo {
		return false
	}
	return e.pack == nil || p.live[e.pack] < e.pack.size/sparseShare
}

// packRun packs the encodings of items, which have size bytes.
func (p *packer) packRun(items []*Item, size int) {
	if size < minPackBytes {
		return
	}
	all := make([]byte, 0, size)
	packed := make([]encoding, len(items)) // a single allocation for all
	var sparse *pack
	var unpacked []byte // of sparse
	for n, i := range items {
		e := p.of(i).Load()
		packed[n] = encoding{offset: uint32(len(all)), size: e.size}
		if e.pack == nil {
			all = append(all, e.own...)
			continue
		}
		if e.pack != sparse {
			e.pack.mu.Lock()
			sparse, unpacked = e.pack, e.pack.unpack()
			e.pack.mu.Unlock()
		}
		all = append(all, e.of(unpacked)...)
	}
	compressed := p.encoder().EncodeAll(all, nil)
	if len(compressed) > size/4*3 {
		for n, i := range items {
			own := slices.Clone(packed[n].of(all))
			packed[n] = encoding{own: own, size: packed[n].size, incompressible: true}
			p.of(i).Store(&packed[n])
		}
		return
	}
	whole := &pack{compressed: slices.Clip(bytes.Clone(compressed)), size: size}
	for n, i := range items {
		packed[n].pack = whole
		p.of(i).Store(&packed[n])
	}
	p.live[whole] = size
}
