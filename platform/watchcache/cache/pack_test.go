package cache

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// packing calls packUnchanged as Sweep does, a period later at each call.
type packing struct {
	*Cache
	now time.Time
}

func (p *packing) next() {
	p.now = p.now.Add(packPeriod)
	p.packUnchanged(p.now)
}

// text returns the n-th object's JSON, with about size bytes that compress.
func text(n, size int) []byte {
	return fmt.Appendf(nil, `{"metadata":{"name":"p%04d"},"data":%q}`, n, strings.Repeat(fmt.Sprint(n, ","), size/5))
}

// protobufOf returns bytes that stand for the protobuf of an object.
func protobufOf(json []byte) []byte { return append([]byte{0x0a}, json...) }

// loadPacking returns a cache with n objects of about size bytes in each encoding.
func loadPacking(t *testing.T, n int, encode func(i int) []byte) *packing {
	t.Helper()
	p := loadInto(t, New(1<<20, 0), n, encode)
	p.next()
	return p
}

// loadInto loads n objects into c.
func loadInto(t *testing.T, c *Cache, n int, encode func(i int) []byte) *packing {
	t.Helper()
	c.Apply(reset(1))
	var rows []*registryv1.Row
	for i := range n {
		json := encode(i)
		rows = append(rows, &registryv1.Row{
			Namespace: "ns",
			Name:      fmt.Sprintf("p%04d", i),
			Revision:  1,
			Json:      json,
			Protobuf:  protobufOf(json),
			Encoder:   9,
		})
	}
	if _, err := c.Resource("pods").Snapshot(t.Context(), "", sourceOf(1, rows...), waitFor(c)); err != nil {
		t.Fatal(err)
	}
	return &packing{Cache: c, now: time.Now()}
}

// items returns the objects in the order of their keys.
func (p *packing) items() (all []*Item) {
	s, _ := p.Resource("pods").Loaded()
	s.scan("", "", func(i *Item) bool { all = append(all, i); return true })
	return all
}

// ownBytes returns the bytes of the objects whose JSON is not packed.
func (p *packing) ownBytes() (n int) {
	for _, i := range p.items() {
		if i.json.Load().pack == nil {
			n += i.Size()
		}
	}
	return n
}

// packs returns the packs of the objects' JSON, and how many of them are unpacked.
func (p *packing) packs() (packs map[*pack]bool, unpacked int) {
	packs = map[*pack]bool{}
	for _, i := range p.items() {
		if c := i.json.Load().pack; c != nil && !packs[c] {
			packs[c] = true
			if c.unpacked.Load() != nil {
				unpacked++
			}
		}
	}
	return packs, unpacked
}

// A packed object is compared with etcd's bytes, and stays packed. A pack that is corrupt in memory is a difference.
func TestAPackedObjectIsComparedWithEtcd(t *testing.T) {
	p := loadPacking(t, 100, func(i int) []byte { return text(i, 1000) })
	p.next()
	item := p.items()[7]
	row := func() *registryv1.Row {
		return &registryv1.Row{Namespace: "ns", Name: "p0007", Revision: 1, Json: text(7, 1000),
			Protobuf: protobufOf(text(7, 1000)), Encoder: 9}
	}
	for want, change := range map[string]func(*registryv1.Row){
		"":                               func(*registryv1.Row) {},
		"version, labels or fields":      func(r *registryv1.Row) { r.Labels = map[string]string{"a": "b"} },
		"JSON from byte 23 of 439 on":    func(r *registryv1.Row) { r.Json[23]++ },
		"JSON from byte 438 of 439 on":   func(r *registryv1.Row) { r.Json = r.Json[:438] },
		"protobuf from byte 0 of 440 on": func(r *registryv1.Row) { r.Protobuf = nil },
	} {
		r := row()
		change(r)
		if got, compared := item.DifferenceOf(r); got != want || !compared {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if _, unpacked := p.packs(); unpacked != 0 || item.json.Load().pack == nil {
		t.Error("a comparison unpacks the object")
	}
	clear(item.json.Load().pack.compressed)
	if got, _ := item.DifferenceOf(row()); got != "the compressed object is corrupt" {
		t.Errorf("got %q", got)
	}
}

// Objects that have not changed for a period are packed, and read as before. A read unpacks a pack until it has had no
// reader for a period. Only the encoding that is read is unpacked.
func TestUnchangedObjectsArePacked(t *testing.T) {
	encode := func(i int) []byte { return text(i, 1000) }
	p := loadPacking(t, 500, encode)
	if packs, _ := p.packs(); len(packs) != 0 {
		t.Errorf("%d packs of objects that are younger than a period", len(packs))
	}
	p.next()
	packs, unpacked := p.packs()
	if want := 500 * len(encode(0)) / packBytes; len(packs) < want || len(packs) > want+2 || unpacked != 0 {
		t.Errorf("%d packs instead of about %d, %d of them unpacked", len(packs), want, unpacked)
	}
	for i, item := range p.items() {
		if item.JSONSize() != len(encode(i)) || item.ProtobufSize() != 1+len(encode(i)) {
			t.Fatalf("object %d has %d and %d bytes", i, item.JSONSize(), item.ProtobufSize())
		}
	}
	if _, unpacked := p.packs(); unpacked != 0 {
		t.Errorf("sizes unpack %d packs", unpacked)
	}
	for i, item := range p.items() {
		if got := item.JSON(); !bytes.Equal(got, encode(i)) || item.json.Load().pack != nil && cap(got) != len(got) {
			t.Fatalf("object %d is %s", i, got)
		}
		if protobuf := item.protobuf.Load().pack; protobuf != nil && protobuf.unpacked.Load() != nil {
			t.Fatalf("the JSON of object %d unpacks its protobuf", i)
		}
	}
	p.next() // the packs have been read since the last call
	if again, unpacked := p.packs(); unpacked != len(packs) || len(again) != len(packs) {
		t.Errorf("of %d packs with readers, %d are unpacked", len(again), unpacked)
	}
	held := p.items()[0].JSON() // a slow client's
	p.next()
	p.next()
	if _, unpacked := p.packs(); unpacked != 0 {
		t.Errorf("%d packs without readers are unpacked", unpacked)
	}
	if again := p.items()[0].JSON(); &again[0] != &held[0] {
		t.Error("a pack is unpacked twice at a time")
	}
	p.next()
	p.next()
	runtime.GC() // held is not used any more
	if first := p.items()[0].json.Load().pack; first.held.Value() != nil {
		t.Error("a pack keeps its dropped bytes")
	}
	for i, item := range p.items() {
		if got := item.Protobuf(); !bytes.Equal(got, protobufOf(encode(i))) {
			t.Fatalf("object %d is %q", i, got)
		}
	}
}

// The metadata of a packed object does not keep its pack in memory.
func TestMetadataKeepsNoPack(t *testing.T) {
	p := loadPacking(t, 500, func(i int) []byte { return text(i, 1000) })
	p.next()
	first := p.items()[0]
	metadata, err := first.ThroughMetadata()
	if want := `{"metadata":{"name":"p0000"}`; err != nil || string(metadata) != want {
		t.Errorf("%s, %v", metadata, err)
	}
	for _, i := range p.items()[200:] { // the decoders keep their last bytes
		i.JSON()
	}
	p.next()
	p.next()
	runtime.GC()
	if first.json.Load().pack.held.Value() != nil {
		t.Error("a pack is kept")
	}
	runtime.KeepAlive(metadata)
}

// If most objects of a pack have changed, the others are packed again, so that the pack's memory is free.
func TestASparsePackIsReplaced(t *testing.T) {
	encode := func(i int) []byte { return text(i, 1000) }
	p := loadPacking(t, 500, encode)
	p.next()
	before, _ := p.packs()
	revision := int64(1)
	for i := range 500 {
		if i%4 != 0 {
			revision++
			e := event(logv1.Type_TYPE_MODIFIED, revision, fmt.Sprintf("p%04d", i))
			e.Object.Json = text(i+1, 1000)
			p.Apply(e)
		}
	}
	p.next()
	after, _ := p.packs()
	for c := range after {
		if before[c] {
			t.Error("a sparse pack is left")
		}
	}
	if st := p.Resources()[0]; st.CompressedBytes > st.PackedBytes/4 || st.PackedBytes > st.Bytes+st.EventBytes ||
		st.Memory() > st.Bytes+st.EventBytes-st.PackedBytes/2 {
		t.Errorf("%d bytes of memory: %+v", st.Memory(), st)
	}
	if want := 125 * len(encode(0)) / packBytes; len(after) < want || len(after) > want+2 {
		t.Errorf("%d packs instead of about %d", len(after), want)
	}
	p.next()
	for i, item := range p.items() {
		want := encode(i)
		if i%4 != 0 {
			want = text(i+1, 1000)
		}
		if !bytes.Equal(item.JSON(), want) {
			t.Fatalf("object %d is %s", i, item.JSON())
		}
	}
}

// Few bytes, and bytes that do not compress, are not packed. A large object has a pack of its own.
func TestBytesThatAreNotPacked(t *testing.T) {
	for name, c := range map[string]struct {
		objects int
		encode  func(int) []byte
		packs   int
	}{
		"none":  {0, nil, 0},
		"few":   {3, func(i int) []byte { return text(i, 1000) }, 0},
		"empty": {20, func(int) []byte { return nil }, 0},
		"random": {20, func(i int) []byte {
			data := make([]byte, 10_000)
			r := rand.New(rand.NewPCG(1, uint64(i)))
			for n := range data {
				data[n] = byte(r.Uint32())
			}
			return data
		}, 0},
		"large": {3, func(i int) []byte { return text(i, 1<<20) }, 3},
	} {
		p := loadPacking(t, c.objects, c.encode)
		if packs, _ := p.packs(); len(packs) != 0 {
			t.Errorf("%s: a small load makes %d packs", name, len(packs))
		}
		for range 3 {
			p.next()
		}
		if packs, _ := p.packs(); len(packs) != c.packs {
			t.Errorf("%s: %d packs, not %d", name, len(packs), c.packs)
		}
		for i, item := range p.items() {
			if e := item.json.Load(); !bytes.Equal(item.JSON(), c.encode(i)) || name == "random" && !e.incompressible {
				t.Errorf("%s: object %d is %.100q", name, i, item.JSON())
			}
		}
	}
}

// A snapshot of a paged list, or a slow watch, may have packs that no object has any more. Their unpacked bytes are
// dropped too.
func TestPacksOfASnapshot(t *testing.T) {
	p := loadPacking(t, 200, func(i int) []byte { return text(i, 1000) })
	p.next()
	old := p.items()
	p.Apply(reset(1000)) // drops the objects and events
	old[0].JSON()
	if len(p.unpacked.all) != 1 {
		t.Fatalf("%d packs are unpacked", len(p.unpacked.all))
	}
	p.next()
	p.next()
	if e := old[0].json.Load(); e.pack.unpacked.Load() != nil || len(p.unpacked.all) != 0 {
		t.Error("a pack without readers is unpacked")
	}
}

// Concurrent readers unpack a pack once, and its bytes are dropped once.
func TestConcurrentReadersOfAPack(t *testing.T) {
	for range 200 {
		p := loadPacking(t, 20, func(i int) []byte { return text(i, 1000) })
		p.next()
		items := p.items()
		var wg sync.WaitGroup
		for _, i := range items {
			wg.Go(func() { i.JSON() })
		}
		wg.Wait()
		if n := len(p.unpacked.all); n != 1 {
			t.Fatalf("the list of unpacked packs has %d", n)
		}
		for range 3 {
			p.next()
		}
		if n := len(p.unpacked.all); n != 0 {
			t.Fatalf("the list of unpacked packs has %d", n)
		}
	}
}

// A large load packs its objects before its end.
func TestALargeLoadIsPackedMeanwhile(t *testing.T) {
	c := New(1<<20, 0)
	c.maxGrowth = 500_000
	p := loadInto(t, c, 500, func(i int) []byte { return text(i, 1000) })
	own := p.ownBytes()
	for i, item := range p.items() {
		if !bytes.Equal(item.JSON(), text(i, 1000)) {
			t.Fatalf("object %d is %s", i, item.JSON())
		}
	}
	if own == 0 || own > c.maxGrowth {
		t.Errorf("objects of %d bytes are not packed", own)
	}
	if packs, _ := p.packs(); len(packs) == 0 || len(packs) > 20 { // with a sixteenth of maxGrowth each
		t.Errorf("%d packs", len(packs))
	}
	if c.growth.Load() < int64(own) {
		t.Errorf("%d bytes of a load of which %d are not packed count as growth", c.growth.Load(), own)
	}
}

// Objects are packed before the period ends if many bytes are written.
func TestGrowthIsPackedEarly(t *testing.T) {
	c := New(1<<20, 0)
	c.maxGrowth = 100_000
	p := loadInto(t, c, 0, nil)
	p.next()
	for i := range 2000 {
		e := event(logv1.Type_TYPE_ADDED, int64(i)+2, fmt.Sprintf("p%04d", i))
		e.Object.Json = text(i, 1000)
		c.Apply(e)
		c.PackGrowth()
	}
	own := p.ownBytes()
	if packs, _ := p.packs(); len(packs) == 0 || own > 3*c.maxGrowth {
		t.Errorf("%d packs, and objects of %d bytes are not packed", len(packs), own)
	}
}

// PackGrowth packs no object that is younger than its last call, and nothing if few bytes were written since. An update
// adds only the bytes by which the object grows.
func TestYoungObjectsAreNotPackedEarly(t *testing.T) {
	c := New(1<<20, 0)
	c.maxGrowth = 700_000
	p := loadInto(t, c, 0, nil)
	for i := range 2000 {
		e := event(logv1.Type_TYPE_MODIFIED, int64(i)+2, fmt.Sprintf("p%04d", i%400))
		e.Object.Json = text(i, 1000)
		c.Apply(e)
	}
	for range 2 { // the first call finds young objects only, and nothing arrives before the second
		c.PackGrowth()
		if packs, _ := p.packs(); len(packs) != 0 {
			t.Errorf("%d packs", len(packs))
		}
	}
	if n := c.growth.Load(); n < 400*1000 || n > int64(c.maxGrowth) {
		t.Errorf("400 objects have grown by %d bytes", n)
	}
}

// A cache keeps unpacked bytes up to a bound. Beyond it, slow readers of a pack still share its bytes.
func TestUnpackedBytesAreBounded(t *testing.T) {
	c := New(1<<20, 0)
	c.unpacked.maxBytes = 2 * packBytes
	p := loadInto(t, c, 2000, func(i int) []byte { return text(i, 1000) })
	p.next()
	p.next()
	for range 2 {
		for i, item := range p.items() {
			if !bytes.Equal(item.JSON(), text(i, 1000)) {
				t.Fatalf("object %d is %s", i, item.JSON())
			}
		}
		if packs, unpacked := p.packs(); unpacked != 2 || len(packs) < 5 {
			t.Errorf("%d of %d packs are unpacked", unpacked, len(packs))
		}
	}
	held := p.items()[0].JSON()
	for range 10 { // the pack's bytes are dropped for others at some time
		for _, item := range p.items()[500:] {
			item.JSON()
		}
	}
	if again := p.items()[0].JSON(); &held[0] != &again[0] {
		t.Error("two readers have two copies")
	}
	p.next()
	p.next()
	if p.unpacked.bytes != 0 {
		t.Errorf("%d unpacked bytes are counted, and none are left", p.unpacked.bytes)
	}
}

// Few objects that remain in a pack do not keep it in memory.
func TestFewObjectsKeepNoPack(t *testing.T) {
	p := loadPacking(t, 200, func(i int) []byte { return text(i, 1000) })
	p.next()
	for i := range 195 {
		p.Apply(event(logv1.Type_TYPE_DELETED, int64(i)+2, fmt.Sprintf("p%04d", i)))
	}
	p.next()
	for i, item := range p.items() {
		if item.json.Load().pack != nil || !bytes.Equal(item.JSON(), text(195+i, 1000)) {
			t.Errorf("object %d is in a pack, or is %s", i, item.JSON())
		}
	}
}

// A large object that does not compress keeps no small neighbour from being packed.
func TestALargeRandomNeighbour(t *testing.T) {
	p := loadPacking(t, 50, func(i int) []byte {
		if i != 20 {
			return text(i, 1000)
		}
		data := make([]byte, 90_000)
		r := rand.New(rand.NewPCG(1, 1))
		for n := range data {
			data[n] = byte(r.Uint32())
		}
		return data
	})
	for range 3 {
		p.next()
	}
	packed := 0
	for i, item := range p.items() {
		if e := item.json.Load(); e.pack != nil {
			packed++
		} else if e.incompressible != (i == 20) {
			t.Errorf("object %d is incompressible: %v", i, e.incompressible)
		}
	}
	if packed != 49 {
		t.Errorf("%d objects are packed", packed)
	}
}

// The objects of recent events are packed too, and the frames of old events are dropped. Readers of the events read the
// same bytes.
func TestRecentEventsArePacked(t *testing.T) {
	p := loadPacking(t, 0, nil)
	for i := range 200 {
		e := event(logv1.Type_TYPE_MODIFIED, int64(i)+2, "p")
		e.Object.Json = text(i, 1000)
		e.Previous = &logv1.Object{Json: text(i-1, 1000)}
		p.Apply(e)
	}
	r := p.Resource("pods")
	sub := subscribe(p.Cache, "pods")
	defer sub.Close()
	cursor, _, _ := sub.After(1, 0)
	all, _, _, _, _ := sub.Next(cursor, 1000)
	build := func(context.Context) ([]byte, error) { return make([]byte, 5000), nil }
	before := r.ringBytes.Load()
	for _, e := range all {
		if _, err := e.Frame(t.Context(), "k", build); err != nil {
			t.Fatal(err)
		}
	}
	p.next()
	if got := r.ringBytes.Load(); got != before+200*5000 {
		t.Errorf("the ring has %d bytes, not %d with the frames of young events", got, before+200*5000)
	}
	p.next()
	if got := r.ringBytes.Load(); got != before {
		t.Errorf("the ring has %d bytes, not %d without the frames", got, before)
	}
	packed := 0
	for i, e := range all {
		if len(e.frames.entries) != 0 {
			t.Fatalf("event %d has its frames", i)
		}
		for _, item := range []*Item{e.Item, e.Previous} {
			if item.json.Load().pack != nil {
				packed++
			}
		}
		if !bytes.Equal(e.Item.JSON(), text(i, 1000)) || !bytes.Equal(e.Previous.JSON(), text(i-1, 1000)) {
			t.Fatalf("event %d is %s after %s", i, e.Item.JSON(), e.Previous.JSON())
		}
	}
	if packed < 2*200-minPackBytes/1000 {
		t.Errorf("%d objects of %d events are packed", packed, len(all))
	}
}

// Sweep packs objects without a change for two of its periods, also in a cache of events only. The time is virtual.
func TestSweepPacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]*Cache{"with objects": New(1<<20, 0), "events only": NewEvents(1 << 20)} {
			c.Apply(reset(1))
			for i := range 50 {
				e := event(logv1.Type_TYPE_ADDED, int64(i)+2, "p")
				e.Object.Json = text(i, 1000)
				c.Apply(e)
			}
			packed := func() int { c.Sweep(); return c.Resources()[0].PackedBytes }
			if n := packed(); n != 0 {
				t.Errorf("%s: %d bytes of young events are packed", name, n)
			}
			time.Sleep(packPeriod / 3)
			if n := packed(); n != 0 {
				t.Errorf("%s: %d bytes are packed early", name, n)
			}
			time.Sleep(packPeriod * 2 / 3)
			if n := packed(); n < 20_000 {
				t.Errorf("%s: only %d bytes are packed", name, n)
			}
		}
	})
}

// Readers of objects, writers and packUnchanged run concurrently.
func TestReadersWhileObjectsArePacked(t *testing.T) {
	p := loadPacking(t, 100, func(i int) []byte { return text(i, 1000) })
	var done atomic.Bool
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for !done.Load() {
				for _, i := range p.items() {
					name := fmt.Sprintf(`{"metadata":{"name":%q}`, i.Name)
					if !bytes.HasPrefix(i.JSON(), []byte(name)) {
						t.Errorf("%s is %.100s", i.Name, i.JSON())
						return
					}
				}
			}
		})
	}
	for n := range 50 {
		for i := range 60 { // most objects, so that packs become sparse
			e := event(logv1.Type_TYPE_MODIFIED, int64(n*60+i)+2, fmt.Sprintf("p%04d", i))
			e.Object.Json = text(i, 1000)
			p.Apply(e)
		}
		p.next()
	}
	done.Store(true)
	wg.Wait()
}
