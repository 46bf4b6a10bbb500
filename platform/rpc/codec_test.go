package rpc

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// chunkOf returns a chunk with pieces of the given lengths.
func chunkOf(rng *rand.Rand, size int64, lengths ...int) *watchfanoutv1.ListChunk {
	m := &watchfanoutv1.ListChunk{Size: size}
	for _, n := range lengths {
		p := make([]byte, n)
		for i := range p {
			p[i] = byte(rng.Uint32())
		}
		m.Data = append(m.Data, p)
	}
	return m
}

// cut returns a message as a transport receives it: in buffers of size bytes.
func cut(data []byte, size int) (out mem.BufferSlice) {
	for piece := range slices.Chunk(data, size) {
		out = append(out, mem.SliceBuffer(piece))
	}
	return out
}

// A list's bytes are the same for every encoding and every cut into buffers. This release sends a single piece. Older
// releases send each piece separately.
func TestChunksCrossAsTheyAre(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	for name, m := range map[string]*watchfanoutv1.ListChunk{
		"nothing":     {},
		"a size":      {Size: 7},
		"empty":       {Size: 1, Data: [][]byte{{}}},
		"small ones":  chunkOf(rng, 1<<40, 1, 1, 100, 1, 1023),
		"large ones":  chunkOf(rng, 99999, 1024, 70000, 5000),
		"mixed":       chunkOf(rng, 0, 20, 7600, 1, 7600, 1, 7600, 2),
		"negative":    chunkOf(rng, -1, 3),
		"256 KB once": chunkOf(rng, 5, 256<<10),
		"compressed":  {Size: 1 << 30, Gzip: true, Data: [][]byte{{0x1f, 0x8b}, make([]byte, 5000)}},
	} {
		want := bytes.Join(m.Data, nil)
		ours, err := wireCodec.Marshal(m)
		if err != nil {
			t.Fatal(name, err)
		}
		old, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(name, err)
		}
		var seen watchfanoutv1.ListChunk
		if err := wireCodec.Unmarshal(ours, &seen); err != nil || seen.Size != m.Size || seen.Gzip != m.Gzip ||
			!bytes.Equal(bytes.Join(seen.Data, nil), want) {
			t.Errorf("%s: an older release reads %d bytes of %d, %v", name, len(bytes.Join(seen.Data, nil)),
				len(want), err)
		}
		for _, size := range []int{1, 3, 20, 16384, 1 << 20} {
			for from, data := range map[string][]byte{"this": ours.Materialize(), "an older": old} {
				var c Chunk
				err := wireCodec.Unmarshal(cut(data, size), &c)
				if err != nil || c.Size != m.Size || c.Gzip != m.Gzip || !bytes.Equal(bytes.Join(c.Data, nil), want) {
					t.Errorf("%s from %s release in buffers of %d: %d bytes of %d, size %d, %v", name, from, size,
						len(bytes.Join(c.Data, nil)), len(want), c.Size, err)
				}
				c.Free()
			}
		}
	}
}

// A WatchFrame is received as it was sent, with every field of the contract. Its large parts are not copied.
func TestFramesCrossAsTheyAre(t *testing.T) {
	large, small := bytes.Repeat([]byte("x"), 5000), []byte("small")
	full := &watchfanoutv1.WatchFrame{
		Data:              large,
		Position:          &watchfanoutv1.Position{Revision: 7, Index: 3, Epoch: "h"},
		InitialEventsDone: true,
		End:               true,
		Boundaries:        []*watchfanoutv1.EventBoundary{{End: 5000, Bookmark: true, Traceparent: "t"}},
		ColumnsSent:       true,
		Initial:           [][]byte{small, large, {}, small},
		WatchId:           9,
		Status:            &watchfanoutv1.WatchStatus{Code: 14, Message: "m"},
		CrdChangedAt:      5,
	}
	fields := full.ProtoReflect().Descriptor().Fields()
	for i := range fields.Len() {
		if !full.ProtoReflect().Has(fields.Get(i)) {
			t.Errorf("the test lacks the field %s", fields.Get(i).Name())
		}
	}
	for _, m := range []*watchfanoutv1.WatchFrame{
		{},
		full,
		{Data: small, Boundaries: full.Boundaries},
		{Data: large},
		{Initial: [][]byte{small}},
		{Data: small, Initial: full.Initial},
	} {
		data, err := wireCodec.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		var got watchfanoutv1.WatchFrame
		if err := wireCodec.Unmarshal(cut(data.Materialize(), 999), &got); err != nil || !proto.Equal(&got, m) {
			t.Errorf("%v, %v", &got, err)
		}
		shared := 0
		for _, b := range data {
			if p := b.ReadOnlyData(); len(p) == len(large) && &p[0] == &large[0] {
				shared++
			}
		}
		want := 0
		for _, p := range append([][]byte{m.Data}, m.Initial...) {
			if len(p) == len(large) {
				want++
			}
		}
		if shared != want {
			t.Errorf("%d of %d large parts are shared", shared, want)
		}
	}
}

// Bytes that are not a ListChunk are rejected, and are not read past their end.
func FuzzChunk(f *testing.F) {
	rng := rand.New(rand.NewPCG(2, 2))
	data, _ := proto.Marshal(chunkOf(rng, 12, 5, 1))
	f.Add(data)
	f.Add([]byte{fieldData<<3 | 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, data []byte) {
		var m watchfanoutv1.ListChunk
		wantErr := proto.Unmarshal(data, &m)
		var c Chunk
		err := wireCodec.Unmarshal(cut(data, 7), &c)
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%v, protobuf says %v", err, wantErr)
		}
		if err == nil && (c.Size != m.Size || c.Gzip != m.Gzip ||
			!bytes.Equal(bytes.Join(c.Data, nil), bytes.Join(m.Data, nil))) {
			t.Fatalf("%d %q, not %d %q", c.Size, c.Data, m.Size, m.Data)
		}
	})
}

// The events of a received frame are not copied from its message.
func TestReceivedEventsAreNotCopied(t *testing.T) {
	sent := &watchfanoutv1.WatchFrame{Data: []byte("xx"), Initial: [][]byte{[]byte("x"), []byte("xxx")}}
	data, err := proto.Marshal(sent)
	if err != nil {
		t.Fatal(err)
	}
	var got watchfanoutv1.WatchFrame
	if err := unmarshalFrame(data, &got); err != nil || !proto.Equal(&got, sent) {
		t.Errorf("%v, %v", &got, err)
	}
	copy(data, bytes.ReplaceAll(data, []byte("x"), []byte("y")))
	if string(got.Data) != "yy" || string(bytes.Join(got.Initial, nil)) != "yyyy" {
		t.Errorf("%q and %q are copies", got.Data, got.Initial)
	}
}

// A received frame is protobuf's.
func FuzzFrame(f *testing.F) {
	data, _ := proto.Marshal(&watchfanoutv1.WatchFrame{
		Data:    []byte("a"),
		Initial: [][]byte{[]byte("b"), {}},
		End:     true,
	})
	f.Add(data)
	f.Add([]byte{frameData<<3 | 2, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1})
	f.Add([]byte{frameInitial << 3, 5, frameData<<3 | 2, 1, 'x', frameData<<3 | 2, 1, 'y'})
	f.Fuzz(func(t *testing.T, data []byte) {
		var want watchfanoutv1.WatchFrame
		wantErr := proto.Unmarshal(data, &want)
		got := watchfanoutv1.WatchFrame{Data: []byte("before"), Initial: [][]byte{[]byte("before")}, WatchId: 1}
		err := wireCodec.Unmarshal(cut(data, 7), &got)
		if (err == nil) != (wantErr == nil) {
			t.Fatalf("%v, protobuf says %v", err, wantErr)
		}
		if err == nil && !proto.Equal(&got, &want) {
			t.Fatalf("%v, not %v", &got, &want)
		}
	})
}

func BenchmarkChunk(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 1))
	var lengths []int
	for range 34 {
		lengths = append(lengths, 7600, 1)
	}
	m := chunkOf(rng, 0, lengths...)
	b.SetBytes(34 * 7601)
	b.ReportAllocs()
	for b.Loop() {
		data, _ := wireCodec.Marshal(m)
		c := &Chunk{}
		_ = c.unmarshal(data)
		c.Free()
	}
}
