package eventlog

import (
	"bytes"
	"context"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Every message decodes to events within the size limit, or to an error.
func FuzzEvents(f *testing.F) {
	m, err := Message(&logv1.Event{
		Type:            logv1.Type_TYPE_ADDED,
		Revision:        1,
		StorageResource: "pods",
		Object:          &logv1.Object{Json: make([]byte, 100_000)},
	})
	if err != nil {
		f.Fatal(err)
	}
	f.Add("s2", m.Data)
	f.Add("", []byte{8, 1, 16, 2})
	f.Add("gzip", []byte("x"))
	f.Add("batch, s2", s2.Encode(nil, []byte{10, 4, 8, 1, 16, 2, 10, 4, 8, 1, 16, 3}))
	f.Add("batch", []byte{10, 4, 8, 1, 16, 2, 10, 4, 8, 1, 16, 3})
	f.Fuzz(func(t *testing.T, encoding string, data []byte) {
		h := nats.Header{}
		if encoding != "" {
			h.Set(encodingHeader, encoding)
		}
		events, err := Events(h, data)
		if (err != nil) != (len(events) == 0) {
			t.Errorf("%d events, and the error %v", len(events), err)
		}
		for _, e := range events {
			if _, err := Message(e); err != nil {
				t.Errorf("a decoded event cannot be encoded: %v", err)
			}
		}
	})
}

// A message with a checksum is rejected if a byte of its ID, its expected ID, its encoding or its data has changed, is
// missing or is added. No bytes may move between them.
func FuzzChecksum(f *testing.F) {
	data, err := proto.Marshal(&logv1.Event{Type: logv1.Type_TYPE_DELETED, Revision: 7, StorageResource: "pods"})
	if err != nil {
		f.Fatal(err)
	}
	sound := &logv1.StoredMessage{Id: "7.0.p-2", ExpectedLastMsgId: "6.p-1", Encoding: "", Data: data}
	sound.Checksum = checksum(sound)
	f.Add(sound.Id, sound.ExpectedLastMsgId, sound.Encoding, data)
	f.Add("7.0.p-26", ".p-1", "", data)
	f.Add("7.0.p-2", "6.p-1"+string(data[:1]), "", data[1:])
	f.Add("7.0.p-2", "6.p-1", "batch", data)
	f.Add("7.0.p-2", "6.p-1", "", data[:len(data)-1])
	f.Add("", "", "", []byte{})
	f.Fuzz(func(t *testing.T, id, expected, encoding string, data []byte) {
		m := &logv1.StoredMessage{Id: id, ExpectedLastMsgId: expected, Encoding: encoding, Data: data,
			Checksum: sound.Checksum}
		same := id == sound.Id && expected == sound.ExpectedLastMsgId && encoding == sound.Encoding &&
			bytes.Equal(data, sound.Data)
		if events, err := eventsOf(m); same != (err == nil) || same && events[0].Revision != 7 {
			t.Errorf("%v, %v", m, err)
		}
	})
}

// A decrypted event has the contents that were encrypted. All other bytes reset the resource at the event's position.
func FuzzDecrypt(f *testing.F) {
	secret := bytes.Repeat([]byte{7}, KeyBytes)
	aead, err := newAEAD(secret)
	if err != nil {
		f.Fatal(err)
	}
	contents, err := proto.Marshal(&logv1.Contents{Object: &logv1.Object{Json: []byte("{}")}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(contents, true, false, "")
	f.Add(s2.Encode(nil, contents), true, true, "")
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f}, true, true, "")
	f.Add([]byte("short"), false, false, "")
	f.Add(contents, true, false, "another")
	f.Fuzz(func(t *testing.T, data []byte, sealed, compressed bool, name string) {
		e := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Revision: 7, Index: 1, StorageResource: "secrets", More: true}
		if sealed {
			nonce := make([]byte, aead.NonceSize())
			data = aead.Seal(nonce, nonce, data, additionalData(e))
		}
		e.Name = name
		e.Encrypted = &logv1.Encrypted{Key: "k", Data: data, Compressed: compressed}
		key := func(context.Context, string, string) ([]byte, error) { return secret, nil }
		var got *logv1.Event
		err := WithDecryption(t.Context(), key, func(e *logv1.Event) error { got = e; return nil })(e)
		switch {
		case err != nil || got == nil || got.Encrypted != nil || got.Revision != 7 || got.Index != 1 || !got.More ||
			got.StorageResource != "secrets":
			t.Errorf("%v, %v", got, err)
		case got.Type == logv1.Type_TYPE_RESET:
		case !sealed || name != "" || got.Type != logv1.Type_TYPE_ADDED:
			t.Errorf("it decrypts to %v", got)
		}
	})
}

// A response of JetStream to a request for a message is a message or an error.
func FuzzRawMessage(f *testing.F) {
	for _, seed := range []string{
		`{"message":{"subject":"a","seq":3,"hdrs":"TkFUUy8xLjANCk5hdHMtTXNnLUlkOiA3LjAucC0yDQoNCg==","data":"CAE="}}`,
		`{"message":{"seq":3,"hdrs":"TkFUUy8xLjA="}}`,
		`{"error":{"code":404,"err_code":10037}}`, `{"message":{"seq":-1}}`, `{"message":null}`, `[]`, "",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := rawMessage(data)
		if (m == nil) != (err != nil) {
			t.Fatalf("%v, %v", m, err)
		}
		if m != nil {
			newSubjectMessage(m.Header, m.Sequence, m.Data)
			_, _ = eventsOf(storedMessage(m.Header, m.Sequence, m.Data))
		}
		if err := ackError(&nats.Msg{Data: data}); err == nil && !bytes.Contains(data, []byte(":")) {
			t.Errorf("%q acknowledges a message", data)
		}
	})
}

// Any chunks of a stream move a reader and a replay without a panic. A replay has only events after its revision and of
// its epoch, and no event of the reader is of a corrupt message.
func FuzzChunks(f *testing.F) {
	chunk := func(events ...*logv1.Event) []byte {
		c := &logv1.Chunk{Created: 1, Last: uint64(len(events))}
		last := ""
		for n, e := range events {
			data, err := proto.Marshal(e)
			if err != nil {
				f.Fatal(err)
			}
			m := &logv1.StoredMessage{Sequence: uint64(n) + 1, Id: core.IDOf(e, "p").String(), ExpectedLastMsgId: last,
				Data: data}
			m.Checksum, last = checksum(m), m.Id
			c.Messages = append(c.Messages, m)
		}
		data, err := proto.Marshal(c)
		if err != nil {
			f.Fatal(err)
		}
		return data
	}
	begin := &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 4, Epoch: "e"}
	change := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Revision: 6, StorageResource: "pods", Epoch: "e"}
	f.Add(chunk(begin, change, &logv1.Event{Revision: 6, Epoch: "e"}), chunk(begin))
	f.Add(chunk(change, &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 7, StorageResource: "pods"}), chunk(change))
	f.Add([]byte{}, chunk(begin, &logv1.Event{Revision: 9, Epoch: "other"}))
	f.Fuzz(func(t *testing.T, first, second []byte) {
		replay := core.NewReplay(5, "e")
		decoded := 0
		r := &reader{log: Main, handle: func(*logv1.Event) error { decoded++; return nil }}
		for n, data := range [][]byte{first, second} {
			c := &logv1.Chunk{}
			if proto.Unmarshal(data, c) != nil {
				return
			}
			replay.Request("pods")
			err := Main.replayChunk(replay, c, func(e *logv1.Event) (bool, error) {
				if e.Revision <= 5 || e.Epoch != "" && e.Epoch != "e" {
					t.Errorf("a replay has %v", e)
				}
				return n == 0, nil
			})
			if err != nil {
				replay = core.NewReplay(5, "e")
			}
			sound := 0
			for _, m := range c.Messages {
				events, _ := eventsOf(m)
				sound += len(events)
			}
			decoded = 0
			r.Reposition(c)
			for _, m := range c.Messages {
				if err := r.deliver(m, false); err != nil {
					t.Fatal(err)
				}
			}
			if decoded > 2*sound { // a reset may precede each
				t.Errorf("%d events of %d sound events", decoded, sound)
			}
		}
	})
}
