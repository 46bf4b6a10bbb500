package eventlog

import (
	"testing"

	"github.com/nats-io/nats.go"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Every message decodes to an event within the size limit, or to an error.
func FuzzEvent(f *testing.F) {
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
	f.Fuzz(func(t *testing.T, encoding string, data []byte) {
		h := nats.Header{}
		if encoding != "" {
			h.Set(encodingHeader, encoding)
		}
		e, err := Event(h, data)
		if err != nil {
			return
		}
		if _, err := Message(e); err != nil {
			t.Errorf("a decoded event cannot be encoded: %v", err)
		}
	})
}
