package eventlog

import (
	"bytes"
	"errors"
	"testing"

	"google.golang.org/protobuf/proto"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// A reader rejects a message that differs in any bit from the message that the publisher wrote, and a message at the
// place of another. It accepts a message without a checksum.
func TestAChangedMessageIsRejected(t *testing.T) {
	e := &logv1.Event{Type: logv1.Type_TYPE_ADDED, Revision: 5, StorageResource: "pods", Name: "a"}
	data, err := proto.Marshal(e)
	if err != nil {
		t.Fatal(err)
	}
	message := func(change func(*logv1.StoredMessage)) error {
		m := &logv1.StoredMessage{Sequence: 3, Id: "5.0.one1-4", ExpectedLastMsgId: "m4.0.one1-3", Data: bytes.Clone(data)}
		m.Checksum = checksum(m)
		change(m)
		_, err := eventsOf(m)
		return err
	}
	for n := range len(data) * 8 {
		flip := func(m *logv1.StoredMessage) { m.Data[n/8] ^= 1 << (n % 8) }
		if err := message(flip); !errors.Is(err, errChecksum) {
			t.Errorf("bit %d flipped: %v", n, err)
		}
	}
	for name, change := range map[string]func(*logv1.StoredMessage){
		"truncated":             func(m *logv1.StoredMessage) { m.Data = m.Data[:len(m.Data)-1] },
		"another ID":            func(m *logv1.StoredMessage) { m.Id = "5.1.one1-4" },
		"after another message": func(m *logv1.StoredMessage) { m.ExpectedLastMsgId = "m4.0.two1-3" },
		"a byte in another header": func(m *logv1.StoredMessage) {
			m.Id, m.ExpectedLastMsgId = m.Id+"m", m.ExpectedLastMsgId[1:]
		},
		"another encoding":           func(m *logv1.StoredMessage) { m.Encoding = batchEncoding },
		"the checksum of no message": func(m *logv1.StoredMessage) { m.Checksum = "x" },
	} {
		if err := message(change); !errors.Is(err, errChecksum) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := message(func(m *logv1.StoredMessage) { m.Checksum = "" }); err != nil {
		t.Errorf("without a checksum: %v", err)
	}
	if err := message(func(*logv1.StoredMessage) {}); err != nil {
		t.Error(err)
	}
}

func BenchmarkChecksum(b *testing.B) {
	m := &logv1.StoredMessage{Id: "5.0.one1-4", ExpectedLastMsgId: "m4.0.one1-3", Data: make([]byte, 16<<10)}
	b.SetBytes(int64(len(m.Data)))
	for b.Loop() {
		checksum(m)
	}
}
