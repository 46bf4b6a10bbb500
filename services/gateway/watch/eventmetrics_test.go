package watch

import (
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"watershed.dev/platform/events"
	"watershed.dev/platform/frame"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// recorded returns the number of events of a resource, and the number and sum of their sizes.
func recorded(t *testing.T, resource string) (events, sizes int, bytes int) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				switch {
				case l.GetName() != "resource" || l.GetValue() != resource:
				case f.GetName() == "apiserver_watch_events_total":
					events = int(m.GetCounter().GetValue())
				case f.GetName() == "apiserver_watch_events_sizes":
					sizes, bytes = int(m.GetHistogram().GetSampleCount()), int(m.GetHistogram().GetSampleSum())
				}
			}
		}
	}
	return events, sizes, bytes
}

// A broadcast looks up its metrics when a client is sent an event or a bookmark, and again when they are old.
func TestEventMetricsOfABroadcast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newTestBroadcast(hub(newTier()))
		r := b.join(nil, events.Position{Revision: 1})
		r.AllowBookmarks, r.NextBookmark, r.BookmarkPeriod = true, time.Now().Add(time.Minute), time.Minute
		revision := int64(1)
		receive := func(bookmark bool) {
			t.Helper()
			revision++
			m := newTestFrame(revision, 10)
			m.Boundaries[0].Bookmark = bookmark
			b.dispatch(m)
			if _, err := b.next(r); err != nil {
				t.Fatal(err)
			}
		}
		receive(true)
		if b.events != nil {
			t.Error("the broadcast looks up its metrics for a bookmark that is not due")
		}
		receive(false)
		first := b.events
		if first == nil {
			t.Fatal("the event is not counted")
		}
		time.Sleep(2 * eventMetricsTimeout)
		receive(true)
		if b.events != first {
			t.Error("the broadcast looks up its metrics again for a bookmark that is not due")
		}
		time.Sleep(time.Minute)
		receive(true)
		if b.events == first {
			t.Error("a due bookmark is counted in old metrics")
		}
	})
}

// TestEventMetricsCountEveryEvent checks that each event counts once for each watch, in both encodings, whether it
// arrives by itself, among other events or in pieces.
func TestEventMetricsCountEveryEvent(t *testing.T) {
	metrics.Register()
	metrics.Reset() // the test may run again
	object, message := `{"kind":"ConfigMap","apiVersion":"v1","a":1}`, []byte("message")
	for _, c := range []struct {
		mediaType, resource string
		event               []byte
		pieces              [][]byte
	}{
		{"application/json", "inlines", frame.WatchJSON("ADDED", []byte(object)), [][]byte{
			frame.WatchJSONHead("ADDED", "ConfigMap", "v1"), []byte(`"a":1}`), frame.WatchJSONTail}},
		{"application/vnd.kubernetes.protobuf", "inmessages",
			frame.WatchProtobuf("ADDED", frame.Envelope("ConfigMap", "v1", message)), [][]byte{
				frame.WatchProtobufHead("ADDED", "ConfigMap", "v1", len(message)), message, frame.TailProtobuf}},
	} {
		m := newEventMetrics(&watchfanoutv1.Query{
			Resource: &commonv1.Resource{Version: "v1", Resource: c.resource},
			Output:   &registryv1.Output{MediaType: c.mediaType},
		})
		twice := append(append([]byte{}, c.event...), c.event...)
		m.sent(3, c.event, c.event)                                        // 6 events
		m.sentFrames(twice)                                                // 2 events
		m.sentPieces(append([][]byte{c.event}, c.pieces...))               // 2 events
		m.sentPieces(append(append([][]byte{}, c.pieces...), c.pieces...)) // 2 events
		events, sizes, bytes := recorded(t, c.resource)
		if events != 12 || sizes != 12 || bytes != 12*len(c.event) {
			t.Errorf("%s: %d events and %d sizes of %d bytes, want 12 of %d", c.mediaType, events, sizes, bytes,
				12*len(c.event))
		}
	}
}
