package watch

import (
	"bytes"
	"compress/gzip"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/events"
)

// plain returns the contents of a gzip body, which must be a single member with a valid checksum and nothing after it.
func plain(t *testing.T, gzipBody []byte) string {
	t.Helper()
	from := bytes.NewReader(gzipBody)
	r, err := gzip.NewReader(from)
	if err != nil {
		t.Fatal(err)
	}
	r.Multistream(false)
	text, err := io.ReadAll(r)
	if err != nil || from.Len() > 0 {
		t.Fatalf("%q, %v, and %d bytes after it", text, err, from.Len())
	}
	return string(text)
}

// Plain and compressed bodies share a broadcast. Each event arrives at once, and the body ends with its trailer.
func TestCompressedWatch(t *testing.T) {
	s := newDetachedServer(t)
	s.tier.write(6)
	whole := s.open(t, unchanged)
	stopping := make(chan struct{})
	var received []*gzipLines
	for _, resourceVersion := range []string{"", "5", "6"} { // initial events, a replay, and the broadcast alone
		b := s.open(t, func(r *Request) { r.Compress, r.Stopping, r.ResourceVersion = true, stopping, resourceVersion })
		received = append(received, newGzipLines(t, b))
	}
	s.waitForReceivers(t, 4)
	s.tier.write(7)
	s.tier.write(8)
	whole.expect(t, "e6", "e7", "e8")
	received[0].expect(t, "initial", "e7", "e8")
	received[1].expect(t, "e6", "e7", "e8")
	received[2].expect(t, "e7", "e8")
	close(stopping)
	for i, want := range []string{"initial\ne7\ne8\n", "e6\ne7\ne8\n", "e7\ne8\n"} {
		if got := received[i].rest(t); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	whole.leave()
	s.expectNothingLeft(t, 4)
}

// gzipLines reads the lines of a compressed body as they arrive.
type gzipLines struct {
	raw   bytes.Buffer // the bytes read of the body
	body  io.Reader
	lines *gzip.Reader
}

func newGzipLines(t *testing.T, b body) *gzipLines {
	t.Helper()
	l := &gzipLines{}
	l.body = io.TeeReader(b.lines, &l.raw)
	r, err := gzip.NewReader(l.body)
	if err != nil {
		t.Fatal(err)
	}
	l.lines = r
	return l
}

func (l *gzipLines) expect(t *testing.T, lines ...string) {
	t.Helper()
	for _, want := range lines {
		got := make([]byte, len(want)+1)
		if _, err := io.ReadFull(l.lines, got); err != nil || string(got) != want+"\n" {
			t.Fatalf("%q (%v), want %q", got, err, want)
		}
	}
}

// rest reads the body to its end, and returns all of its contents.
func (l *gzipLines) rest(t *testing.T) string {
	t.Helper()
	if _, err := io.Copy(io.Discard, l.body); err != nil {
		t.Fatal(err)
	}
	return plain(t, l.raw.Bytes())
}

// A compressed receiver whose connection had no space takes its entries with the watch's goroutine.
func TestBlockedCompressedReceiverIsWoken(t *testing.T) {
	h := hub(newTier())
	b := newTestBroadcast(h)
	w := &clientWatch{woken: make(chan struct{}, 1)}
	r := b.join(w, events.Position{Revision: 1})
	r.gzip, r.Direct = new(deflate.Sum), true
	b.mu.Lock()
	b.compressed++
	r.Block(false)
	b.mu.Unlock()
	b.dispatch(newTestFrame(2, 100))
	r.Unblock()
	select {
	case <-w.woken:
	default:
		t.Fatal("the watch is not woken")
	}
	if parts, err := b.next(r); err != nil || len(parts) != 1 {
		t.Errorf("%d parts, %v", len(parts), err)
	}
	if b.leave(r); b.compressed != 0 {
		t.Errorf("%d compressed receivers are left", b.compressed)
	}
}

// A watch over HTTP/1.1 has no stream that the broadcast could write to.
func TestCompressedWatchWithoutStream(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	stopping := make(chan struct{})
	c := h.watch(t, func(r *Request) { r.Compress, r.Stopping = true, stopping })
	h.waitForReceivers(t, 1)
	up.write(7)
	for until := time.Now().Add(5 * time.Second); c.receivedWrites() < 2; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatalf("%d writes", c.receivedWrites())
		}
	}
	close(stopping)
	<-c.done
	if got := plain(t, append(deflate.Header(), c.text.String()...)); got != "e6\ne7\n" {
		t.Errorf("%q", got)
	}
}

func (s *recordingSink) receivedWrites() int { return len(s.changed) }

// A client that ceases to read receives no trailer, because the last part may be incomplete.
func TestNoTrailerAfterAnIncompletePart(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	h.Config.WriteTimeout = 10 * time.Millisecond
	c := h.watch(t, func(r *Request) { r.Compress = true })
	<-c.changed // e6
	c.mu.Lock()
	c.block = make(chan struct{})
	c.mu.Unlock()
	up.write(7)
	<-c.done
	if n := len(c.changed); n > 0 {
		t.Errorf("%d writes after the part that the client did not accept", n)
	}
}

// Members of shared initial events receive the same compressed part.
func TestInitialEventsAreCompressedOnce(t *testing.T) {
	f := newSharedFrame(newTestFrame(2, 100))
	f.Initial = [][]byte{[]byte(strings.Repeat("initial ", 100))}
	var sent atomic.Pointer[byte]
	for range 2 {
		part, err := f.compressInitial()
		if err != nil || part.Size != 800 {
			t.Fatal(part, err)
		}
		if first := sent.Swap(&part.Data[0]); first != nil && first != &part.Data[0] {
			t.Error("the events are compressed twice")
		}
	}
}
