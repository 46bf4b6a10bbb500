package watch

import (
	"testing"

	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

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
