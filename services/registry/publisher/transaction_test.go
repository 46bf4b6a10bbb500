package publisher

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
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

// summary lists the published messages: resource, index, and whether more of the transaction follows.
func (l *fakeJetStream) summary(t *testing.T) (out []string) {
	t.Helper()
	for _, m := range l.messages {
		e, err := eventlog.Event(m.Header, m.Data)
		if err != nil {
			t.Fatal(err)
		}
		s := fmt.Sprintf("%s %d", e.StorageResource, e.Index)
		if e.Type == logv1.Type_TYPE_RESET {
			s = "reset " + s
		}
		if e.More {
			s += " more"
		}
		out = append(out, s)
	}
	return out
}

// A transaction is published once, whole and in one order, from any point at which the log ends within it. An event
// that no message can hold resets its resource, also if the log is past it.
func TestTransactionResumes(t *testing.T) {
	// Of four events, the second changes the CRD of "widgets", the third cannot be decoded, and the last is too large.
	fresh := func() *transaction {
		tx := &transaction{revision: 20, size: 4}
		for i, name := range []string{"pods", "definitions", "", "configmaps"} {
			if name == "" {
				tx.reject(i, "secrets", "/registry/secrets/x", errors.New("rubbish"))
				continue
			}
			e := &logv1.Event{
				Type:            logv1.Type_TYPE_MODIFIED,
				Revision:        20,
				Index:           int32(i),
				StorageResource: name,
				Object:          &logv1.Object{Json: []byte("{}")},
			}
			if name == "configmaps" {
				e.Object.Json = append([]byte(nil), fmt.Sprintf("%01000d", 7)...)
			}
			tx.events = append(tx.events, e)
		}
		tx.reset(1, "widgets", true)
		return tx
	}
	whole := []string{"pods 0 more", "definitions 1 more", "reset widgets 7 more",
		"reset secrets 8 more", "reset configmaps 10"}
	begins := map[string]eventlog.ID{
		"between two":      {Revision: 19, Progress: true},
		"after its first":  {Revision: 20, Index: 0},
		"after its events": {Revision: 20, Index: 1},
		"among its resets": {Revision: 20, Index: 7},
		"before the last":  {Revision: 20, Index: 8},

		"at its end": {Revision: 20, Index: 10},
	}
	left := map[string]int{
		"between two":      5,
		"after its first":  4,
		"after its events": 3,
		"among its resets": 2,
		"before the last":  1,
		"at its end":       0,
	}
	for name, last := range begins {
		js := &fakeJetStream{}
		w := &term{log: eventlog.NewWriter(js, 4<<10+500, last, func(eventlog.ID) {})}
		if err := fresh().append(t.Context(), w); err != nil {
			t.Fatal(err)
		}
		if err := w.log.Flush(t.Context()); err != nil {
			t.Error(err)
		}
		if got, want := js.summary(t), whole[len(whole)-left[name]:]; !slices.Equal(got, want) {
			t.Errorf("%s it publishes %q, not %q", name, got, want)
		}
	}
}
