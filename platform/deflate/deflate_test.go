package deflate

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"net/http"
	"testing"
)

// body returns a gzip body of parts.
func body(t testing.TB, parts ...[]byte) []byte {
	t.Helper()
	var b Sum
	out := Header()
	for i, p := range parts {
		part := Compress(p)
		if part.Size != int64(len(p)) {
			t.Fatalf("%d bytes of %d", part.Size, len(p))
		}
		if i%2 == 1 { // a stored part among compressed parts
			part = Stored(p)
		}
		b.Add(part)
		out = append(out, part.Data...)
	}
	return append(out, b.Trailer()...)
}

// plain decompresses a gzip body with the standard library, which checks the checksum, the size and the end.
func plain(t testing.TB, compressed []byte) []byte {
	t.Helper()
	from := bytes.NewReader(compressed)
	r, err := gzip.NewReader(from)
	if err != nil {
		t.Fatal(err)
	}
	r.Multistream(false)
	out, err := io.ReadAll(r)
	if err != nil || from.Len() > 0 {
		t.Fatalf("%v, and %d bytes after it", err, from.Len())
	}
	return out
}

func TestPartsMakeABody(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	noise := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return b
	}
	text := bytes.Repeat([]byte(`{"metadata":{"name":"a"}},`), 20000)
	for name, parts := range map[string][][]byte{
		"none":          {},
		"one":           {text},
		"empty ones":    {{}, text, {}, {}},
		"noise":         {noise(1), noise(TurnBytes - 1), noise(TurnBytes), noise(3*TurnBytes + 1)},
		"alike":         {text[:26], text[26:52], text[:26]},
		"zeros, whole":  {make([]byte, 1<<20), text, make([]byte, 5)},
		"of every size": {text[:100], text[:1000], text[:10000], text[:100000], text[:300000]},
	} {
		t.Run(name, func(t *testing.T) {
			if want := bytes.Join(parts, nil); !bytes.Equal(want, plain(t, body(t, parts...))) {
				t.Error("it is not what was compressed")
			}
		})
	}
}

func TestPiecesCompressToTheSamePart(t *testing.T) {
	whole := bytes.Repeat([]byte("abcdefgh"), 40000)
	pieces := [][]byte{whole[:1], whole[1:1], whole[1:70000], whole[70000:70001], whole[70001:]}
	p := Compress(pieces...)
	if len(pieces[4]) != len(whole)-70001 {
		t.Error("the caller's pieces are not as they were")
	}
	var b Sum
	b.Add(p)
	if !bytes.Equal(whole, plain(t, append(append(Header(), p.Data...), b.Trailer()...))) {
		t.Error("it is not what was compressed")
	}
}

func TestChecksumsOfLargeParts(t *testing.T) {
	zero := make([]byte, 1<<20)
	whole := crc32.NewIEEE()
	var b Sum
	part := &Part{Size: int64(len(zero)), sum: crc32.ChecksumIEEE(zero), shift: shiftOf(int64(len(zero)))}
	for range 64 {
		_, _ = whole.Write(zero)
		b.Add(part)
	}
	if whole.Sum32() != b.sum {
		t.Errorf("%x, and it is %x", b.sum, whole.Sum32())
	}
	// the exponents have the period 2^32 - 1, after which squares repeats
	if half := shiftOf(1 << 30); multiply(half, half) != shiftOf(1<<31) {
		t.Error("2 GB are not twice 1 GB")
	}
}

func TestAccepted(t *testing.T) {
	for value, want := range map[string]bool{
		"": false, "gzip": true, "deflate, gzip": true, "gzip;q=1.0": false, "identity": false, "GZIP": false,
	} {
		if AcceptsGzip(http.Header{"Accept-Encoding": {value}}) != want {
			t.Errorf("%q", value)
		}
	}
}

func FuzzParts(f *testing.F) {
	f.Add([]byte("ab"), []byte(""), []byte("c"))
	f.Fuzz(func(t *testing.T, x, y, z []byte) {
		if !bytes.Equal(bytes.Join([][]byte{x, y, z}, nil), plain(t, body(t, x, y, z))) {
			t.Errorf("%q, %q, %q", x, y, z)
		}
	})
}

func BenchmarkBody(b *testing.B) {
	var text []byte
	for i := range 1000 {
		text = fmt.Appendf(text, `{"metadata":{"name":"name-%d","uid":"%x"},"data":{"a":"%d"}},`, i, i*7919, i*i)
	}
	b.Run("compress", func(b *testing.B) {
		b.SetBytes(int64(len(text)))
		for b.Loop() {
			Compress(text)
		}
	})
	part := Compress(text)
	b.Run("join", func(b *testing.B) {
		var sum Sum
		for b.Loop() {
			sum.Add(part)
		}
	})
}
