package eventlog

import (
	"testing"

	"github.com/klauspost/compress/s2"
	"github.com/nats-io/nats.go"

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
