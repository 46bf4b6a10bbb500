package eventlog

import (
	"testing"
	"time"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// The readers of a process have the events of its writer. They decode a message that has changed, and encrypted events.
func TestReadersShareTheEventsOfAWriter(t *testing.T) {
	share := func(e *logv1.Event) (stored *logv1.StoredMessage) {
		t.Helper()
		m, err := Message(e)
		if err != nil {
			t.Fatal(err)
		}
		stored = &logv1.StoredMessage{Id: "1." + e.Name, Data: m.Data}
		stored.Checksum = checksum(stored)
		w := &Writer{open: []core.LogEntry{{Event: e, Payload: m}}, openBytes: len(m.Data)}
		w.share(messageKey{stored.Id, stored.Checksum})
		return stored
	}
	plain := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Name: "plain", Object: &logv1.Object{Json: []byte(`{}`)}}
	secret := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Name: "secret", Encrypted: &logv1.Encrypted{Key: "k"}}
	stored := share(plain)
	for range 2 {
		if got, err := eventsOf(stored); err != nil || len(got) != 1 || got[0] != plain {
			t.Errorf("%v, %v", got, err)
		}
	}
	SweepAppended(time.Hour)
	if got, _ := eventsOf(stored); len(got) != 1 || got[0] != plain {
		t.Errorf("a sweep drops an event that was read just now: %v", got)
	}
	SweepAppended(0)
	if got, err := eventsOf(stored); err != nil || got[0] == plain || got[0].Name != "plain" {
		t.Errorf("after a sweep: %v, %v", got, err)
	}
	if got, err := eventsOf(share(secret)); err != nil || got[0] == secret || got[0].Encrypted.Key != "k" {
		t.Errorf("%v, %v", got, err)
	}
	stored.Data = append([]byte{}, stored.Data...)
	stored.Data[len(stored.Data)-1]++
	if got, err := eventsOf(stored); err == nil {
		t.Errorf("a changed message has %v", got)
	}
	stored.Checksum = checksum(stored)
	if got, err := eventsOf(stored); err != nil || got[0] == plain {
		t.Errorf("another message: %v, %v", got, err)
	}
}

// A message that was sent leaves its buffers to the next.
func TestABatchKeepsItsEvents(t *testing.T) {
	w := &Writer{}
	for _, size := range []int{10, 5000, 40} { // plain, compressed, plain
		w.open, w.openBytes = nil, 0
		for range 3 {
			e := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Object: &logv1.Object{Json: make([]byte, size)}}
			m, err := Message(e)
			if err != nil {
				t.Fatal(err)
			}
			w.open = append(w.open, core.LogEntry{Event: e, Payload: m})
		}
		for _, n := range []int{3, 1} {
			w.open = w.open[:n]
			sent := w.batch()
			got, err := decode(sent.Header.Get(encodingHeader), sent.Data)
			if err != nil || len(got) != n || len(got[n-1].Object.Json) != size {
				t.Errorf("%d events of %d bytes: %d, %v", n, size, len(got), err)
			}
		}
	}
}
