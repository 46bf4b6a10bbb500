// Package eventlog tests the event log against a real NATS server.
package eventlog

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/test/harness"
)

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

// TestALogWithoutItsLastMessageBeginsAgain checks that the publisher begins the log again if the stream has lost its
// last message only. Readers get the reset.
func TestALogWithoutItsLastMessageBeginsAgain(t *testing.T) {
	c := start(t)
	c.write(reset(10), added(11, "pods"), added(12, "pods"))
	stream, err := c.js.Stream(t.Context(), eventlog.StreamName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.DeleteMsg(t.Context(), 3); err != nil {
		t.Fatal(err)
	}
	c.write(reset(20), added(21, "pods"))
	c.read().is(t, "!10 11 !20 21 ")
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
		if err := first.append(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	if err := first.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, e := range []*logv1.Event{added(11, "secrets"), added(12, "secrets"), added(13, "secrets")} {
		if err = other.append(t.Context(), e); err != nil {
			break // the writer waits for the first acknowledgement
		}
	}
	if err == nil {
		err = other.flush(t.Context())
	}
	if err == nil {
		t.Error("the log accepted two messages after the same message")
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
	if err := w.append(t.Context(), reset(10)); err != nil {
		t.Fatal(err)
	}
	large := added(11, "pods")
	large.Object.Json = make([]byte, 33<<20)
	_, _ = rand.Read(large.Object.Json) // random data does not compress
	if err := w.append(t.Context(), large); err == nil {
		t.Error("a message holds it")
	}
	if err := w.append(t.Context(), added(12, "pods")); err != nil {
		t.Fatal(err)
	}
	if err := w.flush(t.Context()); err != nil {
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

// TestACorruptMessageIsAReset checks that a corrupt message is as good as lost: the next message follows a gap. A
// flipped bit leaves a message that decodes, so only its checksum reveals it. A replay expires at the message, and a
// replay that would begin after it. Each reader counts the message.
func TestACorruptMessageIsAReset(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	for revision := int64(11); revision <= 21; revision++ {
		c.write(added(revision, "pods"))
	}
	c.replace(5, func(m *nats.Msg) { // revision 14
		digit := bytes.Index(m.Data, []byte("o14")) + 2
		m.Data[digit] ^= 1
		m.Header.Del("Watershed-Checksum")
		if got, err := eventlog.Events(m.Header, m.Data); err != nil || got[0].Revision != 14 || got[0].Name != "o15" {
			t.Fatalf("without a checksum: %v, %v", got, err)
		}
	})
	counted := func(read string, f func()) {
		t.Helper()
		before := testutil.ToFloat64(eventlog.Metrics()[0])
		if f(); testutil.ToFloat64(eventlog.Metrics()[0]) == before {
			t.Errorf("%s counted no corrupt message", read)
		}
	}
	var r *reading
	counted("a reader", func() {
		r = c.read()
		r.is(t, "!10 11 12 13 !14 15 16 17 18 19 20 21 ")
	})
	for after, want := range map[int64]string{10: "11 12 13 ", 13: ""} {
		counted("a replay", func() {
			got := ""
			err := eventlog.Main.Replay(t.Context(), c.stored(), "pods", after, "", func(e *logv1.Event) (bool, error) {
				got += fmt.Sprintf("%d ", e.Revision)
				return true, nil
			})
			if !errors.Is(err, eventlog.ErrExpired) || got != want {
				t.Errorf("a replay after %d: %q, %v", after, got, err)
			}
		})
	}
	c.write(added(22, "pods"))
	r.is(t, "!10 11 12 13 !14 15 16 17 18 19 20 21 22 ")
}

// TestAnUndecodableMessageIsAReset checks the same for a message that cannot be decoded, and has no checksum.
func TestAnUndecodableMessageIsAReset(t *testing.T) {
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
	m.Header.Set("Content-Encoding", "batch")
	if _, err := c.js.PublishMsg(t.Context(), m, jetstream.WithMsgID("15.0.t"),
		jetstream.WithExpectLastMsgID(c.last())); err != nil {
		t.Fatal(err)
	}
	c.write(added(16, "pods"))
	r.is(t, "!10 11 !12 13 !15 16 ")
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
	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	_ = eventlog.Main.Read(ctx, c.nc, c.stored(), func(e *logv1.Event) error {
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
	if _, err := eventlog.Events(nats.Header{"Content-Encoding": {"s2"}}, bomb); err == nil {
		t.Error("a message unpacks to 100 MB")
	}
	bomb = s2.Encode(nil, bytes.Repeat([]byte{10, 0}, 1<<20))
	if _, err := eventlog.Events(nats.Header{"Content-Encoding": {"batch, s2"}}, bomb); err == nil {
		t.Error("a batch has 1,048,576 empty events")
	}
}
