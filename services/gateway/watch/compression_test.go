package watch

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"strings"
	"testing"
	"time"

	"watershed.dev/platform/events"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/h2writer"
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
		received = append(received, newGzipLines(b))
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

func newGzipLines(b body) *gzipLines {
	l := &gzipLines{}
	l.body = io.TeeReader(b.lines, &l.raw)
	return l
}

func (l *gzipLines) expect(t *testing.T, lines ...string) {
	t.Helper()
	if l.lines == nil { // the body begins with its first event
		r, err := gzip.NewReader(l.body)
		if err != nil {
			t.Fatal(err)
		}
		l.lines = r
	}
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

// A compressed receiver whose connection had no space takes its entries with the watch's goroutine. The broadcast
// compresses nothing for it.
func TestBlockedCompressedReceiverIsWoken(t *testing.T) {
	h := hub(newTier())
	b := newTestBroadcast(h)
	w := &clientWatch{woken: make(chan struct{}, 1)}
	r := b.join(w, events.Position{Revision: 1})
	r.gzip, r.Direct = new(gzipBody), true
	b.mu.Lock()
	r.Block(false)
	b.mu.Unlock()
	b.dispatch(newTestFrame(2, 100)) // a write would panic, because there is no stream
	r.Unblock()
	select {
	case <-w.woken:
	default:
		t.Fatal("the watch is not woken")
	}
	if parts, err := b.next(r); err != nil || len(parts) != 1 {
		t.Errorf("%d parts, %v", len(parts), err)
	}
	if r.gzip.begun {
		t.Error("the broadcast has written")
	}
}

// A watch over HTTP/1.1 has no stream that the broadcast could write to.
func TestCompressedWatchWithoutStream(t *testing.T) {
	up := newTier()
	up.write(6)
	h := hub(up)
	stopping := make(chan struct{})
	c := h.watch(t, func(r *Request) { r.Compress, r.Stopping = true, stopping })
	for _, revision := range []int64{7, 8} {
		<-c.changed
		up.write(revision)
	}
	<-c.changed
	close(stopping)
	<-c.done
	if got := plain(t, []byte(c.text.String())); got != "e6\ne7\ne8\n" {
		t.Errorf("%q", got)
	}
}

// The body of a watch without events is complete too: here its permission was revoked.
func TestCompressedWatchWithoutEvents(t *testing.T) {
	up := newTier()
	up.write(6)
	c := hub(up).watch(t, func(r *Request) {
		r.Compress, r.Allowed = true, func(context.Context) bool { return false }
	})
	<-c.done
	if got := plain(t, []byte(c.text.String())); got != "" {
		t.Errorf("%q", got)
	}
}

// failingSink fails a write, and records the writes after it.
type failingSink struct {
	*recordingSink
	writes, failAt int
}

func (s *failingSink) Write(ctx context.Context, timeout time.Duration, frames ...[]byte) error {
	if s.writes++; s.writes == s.failAt {
		return h2writer.ErrSlowClient
	}
	return s.recordingSink.Write(ctx, timeout, frames...)
}

// A client that ceases to read receives no trailer, because the last part may be incomplete.
func TestNoTrailerAfterAnIncompletePart(t *testing.T) {
	for failAt, want := range map[int]int{1: 1, 2: 2, 3: 3} { // the third is the trailer
		sink := &failingSink{recordingSink: newScreen(), failAt: failAt}
		w := &clientWatch{hub: hub(newTier()), sink: sink, gzip: new(gzipBody), headersSent: true}
		w.Request = &Request{WatchRequest: &watchfanoutv1.WatchRequest{}}
		for range 2 {
			if w.write(t.Context(), []byte("event\n")) != nil {
				break
			}
		}
		if w.endBody(t.Context()); sink.writes != want {
			t.Errorf("write %d fails: %d writes, want %d", failAt, sink.writes, want)
		}
	}
}

// Members of shared initial events receive the same compressed part.
func TestInitialEventsAreCompressedOnce(t *testing.T) {
	f := newSharedFrame(newTestFrame(2, 100))
	f.Initial = [][]byte{[]byte(strings.Repeat("initial ", 100))}
	first, second := f.compressInitial(), f.compressInitial()
	if first.Size != 800 || first != second {
		t.Error("the events are compressed twice")
	}
}
