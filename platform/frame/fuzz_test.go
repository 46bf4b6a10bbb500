package frame

import (
	"encoding/json"
	"testing"
)

// ThroughMetadata returns the metadata that a parser finds, or an error if the JSON is not an object.
func FuzzThroughMetadata(f *testing.F) {
	f.Add([]byte(`{"metadata":{"name":"a","labels":{"x":"\\u003c"}},"spec":{}}`))
	f.Add([]byte(`{"spec":{"metadata":1},"metadata":{"name":"}\\""}}`))
	f.Add([]byte(`{"metadata":`))
	f.Fuzz(func(t *testing.T, data []byte) {
		cut, err := ThroughMetadata(data)
		if err != nil || !json.Valid(data) {
			return
		}
		if !json.Valid([]byte(string(cut) + "}")) {
			t.Errorf("%q is cut to %q", data, cut)
		}
	})
}

// MetadataProtobuf returns a prefix of the message.
func FuzzMetadataProtobuf(f *testing.F) {
	f.Add([]byte{0x0a, 0x03, 1, 2, 3, 0x12, 0})
	f.Add([]byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0x0f})
	f.Fuzz(func(t *testing.T, data []byte) {
		if m, err := MetadataProtobuf(data); err == nil && len(m) > len(data)+16 {
			t.Errorf("%d bytes are cut to %d", len(data), len(m))
		}
	})
}
