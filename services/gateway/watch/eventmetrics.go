package watch

import (
	"bytes"
	"encoding/binary"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	basemetrics "k8s.io/component-base/metrics"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// eventMetrics are upstream's metrics of the events of a query's resource. A lookup by labels takes longer than a
// count, so they are resolved once for many events.
type eventMetrics struct {
	resolved time.Time
	count    basemetrics.CounterMetric
	sizes    basemetrics.ObserverMetric
	protobuf bool
}

func newEventMetrics(q *watchfanoutv1.Query) *eventMetrics {
	r := q.GetResource()
	return &eventMetrics{
		resolved: time.Now(),
		count:    metrics.WatchEvents.WithLabelValues(r.GetGroup(), r.GetVersion(), r.GetResource()),
		sizes:    metrics.WatchEventsSizes.WithLabelValues(r.GetGroup(), r.GetVersion(), r.GetResource()),
		protobuf: q.GetOutput().GetMediaType() == runtime.ContentTypeProtobuf,
	}
}

// eventMetricsTimeout is the age at which a broadcast resolves its metrics again, because DELETE /metrics replaces
// them.
const eventMetricsTimeout = time.Second

// sent records that each of a number of watches was sent the events.
func (m *eventMetrics) sent(watches int, events ...[]byte) {
	for _, e := range events {
		m.observe(watches, len(e))
	}
}

func (m *eventMetrics) observe(watches, size int) {
	m.count.Add(float64(watches))
	for range watches {
		m.sizes.Observe(float64(size))
	}
}

// sentFrames records that a watch was sent events in frames: the length and the message in protobuf, a line in JSON.
func (m *eventMetrics) sentFrames(frames []byte) {
	for len(frames) > 0 {
		n := bytes.IndexByte(frames, '\n') + 1
		if m.protobuf {
			n = protobufFrame(frames)
		}
		if n <= 0 || n > len(frames) {
			n = len(frames)
		}
		m.observe(1, n)
		frames = frames[n:]
	}
}

// sentPieces records that a watch was sent events in pieces. No piece has the end of an event before its own end, so
// their bytes are not scanned.
func (m *eventMetrics) sentPieces(pieces [][]byte) {
	size, end := 0, 0
	for _, p := range pieces {
		if m.protobuf && size == 0 {
			end = protobufFrame(p)
		}
		size += len(p)
		if m.protobuf && size >= end || !m.protobuf && bytes.HasSuffix(p, []byte{'\n'}) {
			m.observe(1, size)
			size = 0
		}
	}
}

// protobufFrame returns the length of the frame that begins with data, or 0.
func protobufFrame(data []byte) int {
	if len(data) < 4 {
		return 0
	}
	return 4 + int(binary.BigEndian.Uint32(data))
}
