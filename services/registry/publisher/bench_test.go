package publisher

import (
	"context"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// fakeJetStream is a JetStream that records published messages.
type fakeJetStream struct {
	jetstream.JetStream
	messages []*nats.Msg
}

func (l *fakeJetStream) PublishMsgAsync(m *nats.Msg, _ ...jetstream.PublishOpt) (jetstream.PubAckFuture, error) {
	l.messages = append(l.messages, m)
	ok := make(chan *jetstream.PubAck, 1)
	ok <- &jetstream.PubAck{}
	return &fakeAck{ok: ok, m: m}, nil
}

type fakeAck struct {
	ok chan *jetstream.PubAck
	m  *nats.Msg
}

func (a *fakeAck) Ok() <-chan *jetstream.PubAck { return a.ok }
func (a *fakeAck) Err() <-chan error            { return nil }
func (a *fakeAck) Msg() *nats.Msg               { return a.m }

// BenchmarkTransaction measures the append of a transaction of a single event, without decoding and without NATS.
func BenchmarkTransaction(b *testing.B) {
	js := &fakeJetStream{}
	p := &Publisher{}
	t := &term{Publisher: p, log: eventlog.NewWriter(b.Context(), js)}
	t.Term = p.core.Begin("t-", core.Epoch{}, eventlog.Encode(1<<20))
	t.LogRead(core.LogEnd{Last: core.IDOf(&logv1.Event{Revision: 1}, "t")})
	t.EtcdRead(core.EtcdState{Epoch: core.Epoch{ID: "e"}, Revision: 1})
	t.EpochWritten(2)
	object := &logv1.Object{Json: make([]byte, 500), Protobuf: make([]byte, 300)}
	revision := int64(1)
	b.ReportAllocs()
	for b.Loop() {
		revision++
		js.messages = js.messages[:0]
		e := &logv1.Event{
			Type:            logv1.Type_TYPE_MODIFIED,
			Revision:        revision,
			StorageResource: "pods",
			Object:          object,
		}
		t.Transaction([]core.Change{{EtcdEvent: core.EtcdEvent{Key: "pods/a", Revision: revision}, Event: e}})
		if err := t.proceed(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}
