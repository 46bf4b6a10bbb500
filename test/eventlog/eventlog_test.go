// Package eventlog tests the event log against a real NATS server.
package eventlog

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/klauspost/compress/s2"
	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/test/harness"
)

// cluster is a NATS server that can be restarted.
type cluster struct {
	t      testing.TB
	dir    string
	mu     sync.Mutex
	server *natsserver.Server
	log    eventlog.Options
	nc     *nats.Conn
	js     jetstream.JetStream
}

// InProcessConn implements nats.InProcessConnProvider with the current server.
func (c *cluster) InProcessConn() (net.Conn, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.server == nil {
		return nil, errors.New("no server")
	}
	return c.server.InProcessConn()
}

func start(t testing.TB) *cluster {
	c := &cluster{t: t, dir: harness.TempDir(t)}
	c.run()
	t.Cleanup(c.stop)
	c.log = eventlog.Options{Storage: "file", Replicas: 1, Retention: time.Hour, MaxBytes: 512 << 20, Conn: c}
	nc, err := c.log.Connect("test", rpc.TLS{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := eventlog.JetStream(nc)
	if err != nil {
		t.Fatal(err)
	}
	c.nc, c.js = nc, js
	c.begin()
	return c
}

// stored returns the stream in the way that registries read it.
func (c *cluster) stored() eventlog.StreamReader { return eventlog.DirectGetReader{JS: c.js} }

func (c *cluster) run() {
	s, err := natsserver.NewServer(&natsserver.Options{
		JetStream:  true,
		StoreDir:   c.dir,
		DontListen: true,
		NoLog:      true,
		NoSigs:     true,
		MaxPayload: 32 << 20,
	})
	if err != nil {
		c.t.Fatal(err)
	}
	s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		c.t.Fatal("NATS does not start")
	}
	c.mu.Lock()
	c.server = s
	c.mu.Unlock()
}

func (c *cluster) stop() {
	c.mu.Lock()
	s := c.server
	c.server = nil
	c.mu.Unlock()
	if s != nil {
		s.Shutdown()
		s.WaitForShutdown()
	}
}

// begin creates the stream.
func (c *cluster) begin() {
	c.t.Helper()
	// retries as publishers do, because NATS may still be removing the files of a deleted stream
	harness.Eventually(c.t, 10*time.Second, func() error {
		_, err := c.log.Stream(c.t.Context(), c.js)
		return err
	})
}

// write appends events as the publisher does, until the log has them. Each attempt uses a new writer.
func (c *cluster) write(events ...*logv1.Event) {
	c.t.Helper()
	for _, e := range events {
		harness.Eventually(c.t, 10*time.Second, func() error {
			w, err := c.writer()
			if err != nil {
				return err
			}
			if w.Has(e) {
				return nil
			}
			if err := w.Append(e); err != nil {
				return err
			}
			return w.Flush(c.t.Context())
		})
	}
}

// last returns the ID of the log's last message.
func (c *cluster) last() string {
	w, err := c.writer()
	if err != nil {
		c.t.Fatal(err)
	}
	return w.Last().String()
}

// writer returns a writer that continues after the log's last message, or begins an empty log.
func (c *cluster) writer() (*eventlog.Writer, error) {
	last, sequence, ok, err := eventlog.Last(c.t.Context(), c.js)
	if err != nil {
		return nil, err
	}
	w := eventlog.NewWriter(c.js, 32<<20, last, func(eventlog.ID) {})
	if !ok {
		w.Restart(sequence)
	}
	return w, nil
}

func added(revision int64, of string) *logv1.Event {
	return &logv1.Event{
		Type:            logv1.Type_TYPE_ADDED,
		Revision:        revision,
		StorageResource: of,
		Name:            fmt.Sprint("o", revision),
		Object:          &logv1.Object{Json: []byte("{}")},
	}
}

func reset(revision int64) *logv1.Event {
	return &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision}
}

// reading records the events that a reader receives.
type reading struct {
	mu   sync.Mutex
	seen string
}

func (c *cluster) read() *reading {
	r := &reading{}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = eventlog.Read(ctx, c.nc, c.stored(), func(e *logv1.Event) error {
			r.add(e)
			return nil
		})
	}()
	c.t.Cleanup(func() { cancel(); <-done })
	return r
}

func (r *reading) add(e *logv1.Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	mark := map[logv1.Type]string{logv1.Type_TYPE_RESET: "!", logv1.Type_TYPE_UNSPECIFIED: "-"}[e.Type]
	r.seen += fmt.Sprintf("%s%d ", mark, e.Revision)
}

func (r *reading) is(t *testing.T, want string) {
	t.Helper()
	harness.Eventually(t, 20*time.Second, func() error {
		r.mu.Lock()
		defer r.mu.Unlock()
		if r.seen != want {
			return fmt.Errorf("read %q, not %q", r.seen, want)
		}
		return nil
	})
}

func TestAReaderSurvivesNATS(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"))
	r := c.read()
	r.is(t, "!10 11 ")
	c.stop()
	c.run()
	c.write(added(12, "pods"))
	r.is(t, "!10 11 12 ")
}

// TestAGapIsAReset checks that a reader gets a reset before a message that does not follow the previous message. The
// reset covers the possible gap.
func TestAGapIsAReset(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"), added(12, "pods"), added(13, "pods"))
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteMsg(t.Context(), 3); err != nil { // deletes the third message
		t.Fatal(err)
	}
	r := c.read()
	r.is(t, "!10 11 !12 13 ")
	c.write(added(14, "pods"))
	r.is(t, "!10 11 !12 13 14 ")
}

// TestAnEmptiedLogBeginsWithAReset checks that the publisher begins an empty log with a reset.
func TestAnEmptiedLogBeginsWithAReset(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"))
	r := c.read()
	r.is(t, "!10 11 ")
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context()); err != nil {
		t.Fatal(err)
	}
	c.write(reset(20), added(21, "pods"))
	r.is(t, "!10 11 !20 21 ")
}

// TestTwoWritersDoNotForkTheLog checks that of two writers after the same message only one succeeds.
func TestTwoWritersDoNotForkTheLog(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	first, err := c.writer()
	if err != nil {
		t.Fatal(err)
	}
	other, err := c.writer()
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range []*logv1.Event{added(11, "pods"), added(12, "pods")} {
		if err := first.Append(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := first.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, e := range []*logv1.Event{added(11, "secrets"), added(12, "secrets"), added(13, "secrets")} {
		if err := other.Append(e); err != nil {
			t.Fatal(err)
		}
	}
	if err := other.Flush(t.Context()); err == nil {
		t.Error("the log accepted two messages after the same message")
	}
	select {
	case err := <-other.Failed():
		if err == nil {
			t.Error("no reason is given")
		}
	case <-time.After(10 * time.Second):
		t.Error("no writer received the rejection")
	}
	c.read().is(t, "!10 11 12 ")
}

// TestATooLargeEventIsNoMessage checks that an event above the limit fails before any call to NATS, and that the writer
// goes on.
func TestATooLargeEventIsNoMessage(t *testing.T) {
	c := start(t)
	w, err := c.writer()
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Append(reset(10)); err != nil {
		t.Fatal(err)
	}
	large := added(11, "pods")
	large.Object.Json = make([]byte, 33<<20)
	_, _ = rand.Read(large.Object.Json) // random data does not compress
	var unsendable *eventlog.UnsendableError
	if err := w.Append(large); !errors.As(err, &unsendable) {
		t.Errorf("%v", err)
	}
	if err := w.Append(added(12, "pods")); err != nil {
		t.Fatal(err)
	}
	if err := w.Flush(t.Context()); err != nil {
		t.Error(err)
	}
	c.read().is(t, "!10 12 ")
}

func TestARecreatedLogIsAReset(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"), added(12, "pods"))
	r := c.read()
	r.is(t, "!10 11 12 ")
	if err := c.js.DeleteStream(t.Context(), eventlog.StreamName); err != nil {
		t.Fatal(err)
	}
	c.begin()
	c.write(added(30, "pods")) // from a publisher that writes no reset
	r.is(t, "!10 11 12 !29 30 ")
}

func TestACorruptMessageIsAReset(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"))
	r := c.read()
	r.is(t, "!10 11 ")
	m, err := eventlog.Message(added(12, "pods"))
	if err != nil {
		t.Fatal(err)
	}
	m.Data = []byte{0xff, 0xff, 0xff}
	if _, err := c.js.PublishMsg(t.Context(), m, jetstream.WithMsgID("12.0.t"),
		jetstream.WithExpectLastMsgID(c.last())); err != nil {
		t.Fatal(err)
	}
	c.write(added(13, "pods"))
	r.is(t, "!10 11 !12 13 ")
}

func TestReplayReturnsLaterEvents(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	for r := int64(11); r < 60; r++ {
		c.write(added(r, []string{"pods", "nodes"}[r%2]))
	}
	replay := func(after, until int64) (string, error) {
		got := ""
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		err := eventlog.Replay(ctx, c.stored(), "pods", after, func(e *logv1.Event) (bool, error) {
			got += fmt.Sprintf("%s%d ", map[bool]string{true: "-"}[e.Type == logv1.Type_TYPE_UNSPECIFIED], e.Revision)
			return e.Revision < until, nil
		})
		return got, err
	}
	for _, x := range []struct {
		after, until int64
		want         string
	}{{10, 14, "12 14 "}, {11, 12, "12 "}, {12, 16, "14 16 "}, {50, 58, "52 54 56 58 "}} {
		if got, err := replay(x.after, x.until); err != nil || got != x.want {
			t.Errorf("after %d: %q, %v", x.after, got, err)
		}
	}
	c.write(&logv1.Event{Revision: 60})
	if got, err := replay(58, 60); err != nil || got != "-60 " {
		t.Errorf("progress: %q, %v", got, err)
	}
	if got, err := replay(9, 14); !errors.Is(err, eventlog.ErrExpired) || got != "" {
		t.Errorf("from before the log: %q, %v", got, err)
	}
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(20)); err != nil { // up to revision 28
		t.Fatal(err)
	}
	if got, err := replay(27, 32); !errors.Is(err, eventlog.ErrExpired) || got != "" {
		t.Errorf("a replay from removed messages: %q, %v", got, err)
	}
	if got, err := replay(28, 32); err != nil || got != "30 32 " {
		t.Errorf("from the oldest that is kept: %q, %v", got, err)
	}
	c.write(reset(70), added(72, "pods"))
	if got, err := replay(50, 72); !errors.Is(err, eventlog.ErrExpired) {
		t.Errorf("over a reset: %q, %v", got, err)
	}
}

// TestAReplayThatIsOvertakenSaysSo checks that a replay fails if retention removes its next message. The events before
// that have no gap (F2).
func TestAReplayThatIsOvertakenSaysSo(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	const last = 10 + 700
	for r := int64(11); r <= last; r++ {
		c.write(added(r, "pods"))
	}
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	next, purged := int64(11), false
	err = eventlog.Replay(t.Context(), c.stored(), "pods", 10, func(e *logv1.Event) (bool, error) {
		if e.Revision != next {
			t.Fatalf("after %d came %d", next-1, e.Revision)
		}
		next++
		if !purged { // retention removes much later messages
			purged = true
			if err := stream.Purge(t.Context(), jetstream.WithPurgeSequence(650)); err != nil {
				t.Fatal(err)
			}
		}
		return e.Revision < last, nil
	})
	if !errors.Is(err, eventlog.ErrExpired) {
		t.Errorf("it ended at %d with %v", next-1, err)
	}
}

// TestAReplayWhoseRestIsGoneSaysSo checks that a replay fails at once if its remaining messages are gone.
func TestAReplayWhoseRestIsGoneSaysSo(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	for r := int64(11); r <= 600; r++ {
		c.write(added(r, "pods"))
	}
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	err = eventlog.Replay(ctx, c.stored(), "pods", 10, func(e *logv1.Event) (bool, error) {
		return true, stream.Purge(ctx)
	})
	if !errors.Is(err, eventlog.ErrExpired) {
		t.Error(err)
	}
}

// TestLargeEventsComeBack checks that messages of objects up to the maximum size arrive unchanged. A message that
// claims to be larger is corrupt.
func TestLargeEventsComeBack(t *testing.T) {
	c := start(t)
	big := added(11, "pods")
	big.Object.Json = bytes.Repeat([]byte(`\u003c`), 3<<20)
	big.Object.Labels = map[string]string{"odd": "\xff\xfe"}
	big.Name = "\xff"
	c.write(reset(10), big)
	var got *logv1.Event
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	_ = eventlog.Read(ctx, c.nc, c.stored(), func(e *logv1.Event) error {
		if e.Revision == 11 {
			got = e
			return errors.New("enough")
		}
		return nil
	})
	if got == nil || !bytes.Equal(got.Object.Json, big.Object.Json) || got.Name != big.Name ||
		got.Object.Labels["odd"] != "\xff\xfe" {
		t.Error("it did not come back as it was")
	}
	bomb := s2.Encode(nil, make([]byte, 100<<20))
	if _, err := eventlog.Event(nats.Header{"Content-Encoding": {"s2"}}, bomb); err == nil {
		t.Error("a message unpacks to 100 MB")
	}
}
