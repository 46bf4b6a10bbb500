package eventlog

import (
	"bytes"
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"
	"google.golang.org/protobuf/proto"

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
