package frame

import (
	"encoding/json"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// Encoding is how objects are written to a client.
type Encoding struct {
	// Kind and APIVersion are what is written: an object's own, or PartialObjectMetadata's.
	Kind, APIVersion string
	// Protobuf, else JSON.
	Protobuf bool
	// Partial: an object's metadata alone, as a PartialObjectMetadata.
	Partial bool
	// Unstructured objects have no Go type, and in a list a kind of their own.
	Unstructured bool
}

// EncodingOf is the form of objects of a kind, or of their metadata where as is PartialObjectMetadata.
func EncodingOf(kind, as *commonv1.Kind, mediaType string, unstructured bool) Encoding {
	f := Encoding{
		Kind:         kind.GetKind(),
		APIVersion:   APIVersion(kind),
		Protobuf:     mediaType == Protobuf,
		Unstructured: unstructured,
	}
	if k := as.GetKind(); k == "PartialObjectMetadata" || k == "PartialObjectMetadataList" {
		f.Kind, f.APIVersion, f.Partial = "PartialObjectMetadata", APIVersion(as), true
	}
	return f
}

// Item is an object's bytes in a list, of its encodings. In JSON ItemHead takes the place of its opening brace and
// ItemTail follows: of metadata alone it is {"metadata":{…}, not closed.
func (f *Encoding) Item(body, message []byte) ([]byte, error) {
	switch {
	case f.Partial && f.Protobuf:
		return MetadataProtobuf(message)
	case f.Partial:
		return ThroughMetadata(body)
	case f.Protobuf:
		return message, nil
	}
	return body, nil
}

// ItemHead is what comes before an item of a list in JSON, in place of its opening brace; nil for nothing. Protobuf has
// none.
func (f *Encoding) ItemHead() []byte {
	switch {
	case f.Partial:
		return PartialHead(f.APIVersion)
	case f.Unstructured:
		return fmt.Appendf(nil, `{"apiVersion":%q,"kind":%q,`, f.APIVersion, f.Kind)
	}
	return nil
}

// ItemTail is what comes after an item of a list in JSON. Protobuf has none.
func (f *Encoding) ItemTail() []byte {
	if f.Partial {
		return braceJSON
	}
	return nil
}

var braceJSON = []byte{'}'}

// Items are a list's, of what Item has made of them.
func (f *Encoding) Items(bodies [][]byte) *Items {
	return &Items{Bodies: bodies, Head: f.ItemHead(), Tail: f.ItemTail()}
}

// Event is an object in a watch, of its encodings.
func (f *Encoding) Event(event string, body, message []byte) ([]byte, error) {
	switch {
	case f.Partial && f.Protobuf:
		m, err := MetadataProtobuf(message)
		if err != nil {
			return nil, err
		}
		return WatchProtobuf(event, Envelope(f.Kind, f.APIVersion, m)), nil
	case f.Partial:
		p, err := PartialJSON(f.APIVersion, body)
		if err != nil {
			return nil, err
		}
		return WatchJSON(event, p), nil
	case f.Protobuf:
		return WatchProtobuf(event, Envelope(f.Kind, f.APIVersion, message)), nil
	}
	return WatchJSON(event, Object(nil, f.Kind, f.APIVersion, body)), nil
}

// Bookmark is an event that says how far a watch has come. initialEnd: its initial events have all come.
func (f *Encoding) Bookmark(revision int64, initialEnd bool) []byte {
	if f.Protobuf {
		return WatchProtobuf("BOOKMARK", Envelope(f.Kind, f.APIVersion, bookmarkProtobuf(revision, initialEnd)))
	}
	return WatchJSON("BOOKMARK", Object(nil, f.Kind, f.APIVersion, BookmarkJSON(revision, initialEnd)))
}

// Error is the event that a watch ends with.
func (f *Encoding) Error(st metav1.Status) ([]byte, error) {
	st.Kind, st.APIVersion = "Status", "v1"
	if f.Protobuf {
		message, err := st.Marshal()
		if err != nil {
			return nil, err
		}
		return WatchProtobuf("ERROR", Envelope("Status", "v1", message)), nil
	}
	body, err := json.Marshal(st)
	if err != nil {
		return nil, err
	}
	return WatchJSON("ERROR", body), nil
}

// PartialJSON is an object's metadata as a PartialObjectMetadata.
func PartialJSON(apiVersion string, body []byte) ([]byte, error) {
	m, err := MetadataJSON(body)
	if err != nil {
		return nil, err
	}
	b := PartialHead(apiVersion)
	return append(append(slices.Grow(b, len(m)+1), m...), '}'), nil
}

// PartialHead is a PartialObjectMetadata's JSON up to its metadata.
func PartialHead(apiVersion string) []byte {
	return fmt.Appendf(nil, `{"kind":"PartialObjectMetadata","apiVersion":%q,`, apiVersion)
}
