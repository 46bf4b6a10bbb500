package eventlog

import (
	"testing"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// TestABatchHasOneAcknowledgement checks that NATS sends a single response to messages that are sent together, and
// stores all of them.
func TestABatchHasOneAcknowledgement(t *testing.T) {
	c := start(t)
	w, err := c.writer()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	before := c.nc.Stats().InMsgs
	batch, want := []*logv1.Event{reset(10)}, "!10 "
	for r := int64(11); r < 20; r++ {
		batch = append(batch, added(r, "pods"))
	}
	for _, e := range batch[1:] {
		want += e.Name[1:] + " "
	}
	if err := w.append(t.Context(), batch...); err != nil {
		t.Fatal(err)
	}
	if err := w.flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := c.nc.Stats().InMsgs - before; n != 1 {
		t.Errorf("%d messages have %d responses", len(batch), n)
	}
	c.read().is(t, want)
}

// TestABatchEndsAtARejectedMessage checks a batch whose third message the log rejects, or never receives. The messages
// before it are stored, and none after it. The writer receives the error, and the next writer continues without a gap.
func TestABatchEndsAtARejectedMessage(t *testing.T) {
	for name, change := range map[string]func([]core.Message) []core.Message{
		"rejected": func(all []core.Message) []core.Message {
			all[2].Expected = all[0].ID
			return all
		},
		"lost": func(all []core.Message) []core.Message {
			return append(all[:2:2], all[3:]...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := start(t)
			c.write(reset(10))
			w, err := c.writer()
			if err != nil {
				t.Fatal(err)
			}
			var all []core.Message
			for r := int64(11); r <= 15; r++ {
				m, err := w.Append(added(r, "pods"))
				if err != nil {
					t.Fatal(err)
				}
				all, w.sent = append(all, m), m.ID
			}
			if err := w.log.Send(t.Context(), false, change(all)...); err != nil {
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

// TestAStalledLogEndsTheWriter checks that a batch without a response is an error, and that Send does not wait forever.
func TestAStalledLogEndsTheWriter(t *testing.T) {
	c := start(t)
	c.write(reset(10))
	w, err := c.writer()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.js.DeleteStream(t.Context(), "watershed"); err != nil { // no stream responds
		t.Fatal(err)
	}
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
