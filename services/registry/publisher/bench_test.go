package publisher

import (
	"testing"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// BenchmarkTransaction measures the messages of a transaction of a single event, without decoding and without NATS.
func BenchmarkTransaction(b *testing.B) {
	var p core.Publisher
	t := p.Begin("t-", core.Epoch{}, eventlog.Encode(1<<20))
	t.LogRead(core.LogEnd{Last: core.IDOf(&logv1.Event{Revision: 1}, "t")})
	t.EtcdRead(core.EtcdState{Epoch: core.Epoch{ID: "e"}, Revision: 1})
	t.Answer(2)
	t.Progress(2) // the first entry with sums
	t.TakeEntries()
	object := &logv1.Object{Json: make([]byte, 500), Protobuf: make([]byte, 300)}
	revision := int64(2)
	b.ReportAllocs()
	for b.Loop() {
		revision++
		e := &logv1.Event{
			Type:            logv1.Type_TYPE_MODIFIED,
			Revision:        revision,
			StorageResource: "pods",
			Object:          object,
		}
		t.Transaction([]core.Change{{EtcdEvent: core.EtcdEvent{Key: "pods/a", Revision: revision}, Event: e}})
		if len(t.TakeEntries()) != 1 {
			b.Fatal("the event has no message")
		}
	}
}
