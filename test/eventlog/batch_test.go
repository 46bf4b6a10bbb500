package eventlog

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

func init() { eventlog.CheckAppended = true }

// begun returns a cluster whose log begins after revision 10, and a writer that continues it.
func begun(t *testing.T) (*cluster, *writer) {
	t.Helper()
	c := start(t)
	c.write(reset(10))
	w, err := c.writer()
	if err != nil {
		t.Fatal(err)
	}
	return c, w
}

// messages returns the number of messages of the stream.
func (c *cluster) messages() uint64 {
	c.t.Helper()
	s, err := c.js.Stream(c.t.Context(), eventlog.StreamName)
	if err != nil {
		c.t.Fatal(err)
	}
	return s.CachedInfo().State.Msgs
}

// lastOf appends events of pods, and returns the last message of pods.
func (c *cluster) lastOf(w *writer, pods ...*logv1.Event) *jetstream.RawStreamMsg {
	c.t.Helper()
	if err := w.append(c.t.Context(), pods...); err != nil {
		c.t.Fatal(err)
	}
	if err := w.flush(c.t.Context()); err != nil {
		c.t.Fatal(err)
	}
	m, err := eventlog.Main.GetLast(c.t.Context(), c.js, eventlog.Subject("pods"))
	if err != nil {
		c.t.Fatal(err)
	}
	return m
}

// TestEventsOfAResourceShareAMessage checks which events share a message of the stream, and its single acknowledgement.
func TestEventsOfAResourceShareAMessage(t *testing.T) {
	const large = 80 << 10 // it is compressed
	for name, test := range map[string]struct {
		resources string // of the events, by their first letter; P is a pod of size bytes
		size      int
		messages  uint64
	}{
		"one resource":              {"ppppppppp", 0, 1},
		"several resources":         {"ppncccpp", 0, 4},
		"too many for one":          {strings.Repeat("p", 130), 0, 3},
		"too large for one":         {"PPPPP", 20 << 10, 2},
		"a large event is alone":    {"ppPpp", large, 3},
		"a large event comes first": {"Ppp", large, 2},
	} {
		t.Run(name, func(t *testing.T) {
			c, w := begun(t)
			if err := c.nc.Flush(); err != nil {
				t.Fatal(err)
			}
			responses, want := c.nc.Stats().InMsgs, "!10 "
			var batch []*logv1.Event
			for i, r := range test.resources {
				e := added(int64(11+i), map[rune]string{'p': "pods", 'P': "pods", 'n': "nodes", 'c': "configmaps"}[r])
				if r == 'P' {
					e.Object.Json = bytes.Repeat([]byte{'x'}, test.size)
				}
				batch, want = append(batch, e), want+e.Name[1:]+" "
			}
			began := time.Now()
			if err := w.append(t.Context(), batch...); err != nil {
				t.Fatal(err)
			}
			if err := w.flush(t.Context()); err != nil {
				t.Fatal(err)
			}
			quick := time.Since(began) < 100*time.Millisecond // else the writer may have repeated a request
			subjects := map[rune]bool{}
			for _, r := range strings.ToLower(test.resources) {
				subjects[r] = true
			}
			// The writer reads the last message of each subject once.
			responses = c.nc.Stats().InMsgs - responses - uint64(len(subjects))
			if n := c.messages() - 1; n != test.messages || responses != n && quick {
				t.Errorf("%d messages with %d responses, not %d", n, responses, test.messages)
			}
			c.read().is(t, want)
		})
	}
}

// TestLargeMessagesAreCompressed checks which messages of the stream are compressed: above 4 KB, alone or as a batch.
func TestLargeMessagesAreCompressed(t *testing.T) {
	c, w := begun(t)
	revision := int64(10)
	for _, test := range []struct {
		events, size int
		encoding     string
	}{{1, 3 << 10, ""}, {1, 5 << 10, "s2"}, {2, 1 << 10, "batch"}, {2, 3 << 10, "batch, s2"}, {1, 80 << 10, "s2"}} {
		var all []*logv1.Event
		for range test.events {
			revision++
			e := added(revision, "pods")
			e.Object.Json = bytes.Repeat([]byte{'x'}, test.size)
			all = append(all, e)
		}
		m := c.lastOf(w, all...)
		if got := m.Header.Get("Content-Encoding"); got != test.encoding {
			t.Errorf("%d events of %d bytes have the encoding %q, not %q", test.events, test.size, got, test.encoding)
		}
		if events, err := eventlog.Events(m.Header, m.Data); err != nil || len(events) != test.events {
			t.Errorf("%d events, %v", len(events), err)
		}
	}
}

// Readers in the process of a writer get the events of its last messages themselves, and decode nothing.
func TestReadersOfTheProcessShareEvents(t *testing.T) {
	eventlog.CheckAppended = false
	defer func() { eventlog.CheckAppended = true }()
	c, w := begun(t)
	sent := []*logv1.Event{added(11, "pods"), added(12, "pods")}
	m := c.lastOf(w, sent...)
	if got, err := eventlog.Events(m.Header, m.Data); err != nil || !slices.Equal(got, sent) {
		t.Errorf("%v, %v", got, err)
	}
}

// TestAnEventWaitsOnlyAfterAnother checks that an event is published at once if none was published shortly before it.
// Otherwise it waits until Due receives.
func TestAnEventWaitsOnlyAfterAnother(t *testing.T) {
	c, w := begun(t)
	began := time.Now()
	for r := int64(11); r <= 13; r++ {
		m, err := w.Append(added(r, "pods"))
		if err == nil {
			err = w.log.Add(t.Context(), m)
		}
		if err == nil {
			err = w.log.FlushLater(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		w.sent = m.ID
	}
	quick := time.Since(began) < 2*time.Millisecond // the batch period
	for acknowledged := (core.ID{}); acknowledged != w.sent; {
		select {
		case <-w.log.Due():
			if err := w.log.Flush(t.Context()); err != nil {
				t.Fatal(err)
			}
		case ack := <-w.log.Acks():
			if ack.Err != nil {
				t.Fatal(ack.Err)
			}
			acknowledged = ack.ID
		}
	}
	if n := c.messages(); n < 3 || n > 4 || n == 4 && quick {
		t.Errorf("the stream has %d messages", n)
	}
	c.read().is(t, "!10 11 12 13 ")
}

// TestNothingFollowsARejectedMessage checks a message that the log rejects, because its predecessor is missing or
// another. The messages before it are stored, and none after it. The writer receives the error, and the next writer
// continues without a gap.
func TestNothingFollowsARejectedMessage(t *testing.T) {
	for name, change := range map[string]func([]core.LogEntry) []core.LogEntry{
		"rejected": func(all []core.LogEntry) []core.LogEntry {
			all[2].Expected = all[0].ID
			return all
		},
		"lost": func(all []core.LogEntry) []core.LogEntry {
			return append(all[:2:2], all[3:]...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c, w := begun(t)
			var all []core.LogEntry
			for r := int64(11); r <= 15; r++ {
				m, err := w.Append(added(r, "pods"))
				if err != nil {
					t.Fatal(err)
				}
				all, w.sent = append(all, m), m.ID
			}
			err := w.log.Add(t.Context(), change(all)...)
			if err == nil {
				err = w.log.Flush(t.Context())
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := w.flush(t.Context()); err == nil {
				t.Error("the writer receives no error")
			}
			r := c.read()
			r.is(t, "!10 11 12 ")
			for r := int64(13); r <= 15; r++ {
				c.write(added(r, "pods"))
			}
			r.is(t, "!10 11 12 13 14 15 ")
		})
	}
}

// TestAStalledLogEndsTheWriter checks that a message without a response is an error, and that Flush does not wait
// forever.
func TestAStalledLogEndsTheWriter(t *testing.T) {
	c, w := begun(t)
	if err := c.js.DeleteStream(t.Context(), "watershed"); err != nil { // no stream responds
		t.Fatal(err)
	}
	var err error
	for r := int64(11); r < 2000 && err == nil; r++ {
		err = w.append(t.Context(), added(r, "pods"))
	}
	if err == nil {
		err = w.flush(t.Context())
	}
	if err == nil {
		t.Error("the writer receives no error")
	}
}
