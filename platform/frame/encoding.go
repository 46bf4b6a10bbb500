package frame

import (
	"encoding/json"
	"fmt"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// Encoding describes how a client receives objects.
type Encoding struct {
	// Kind and APIVersion are the object's own, or those of PartialObjectMetadata.
	Kind, APIVersion string
	// Protobuf selects protobuf instead of JSON.
	Protobuf bool
	// Partial selects the metadata only, as a PartialObjectMetadata.
	Partial bool
	// OmitAnnotation is an annotation of the object that its metadata alone does not have. Empty: none.
	OmitAnnotation string
	// Unstructured objects have no Go type. In a list each has its own kind and apiVersion.
	Unstructured bool
}

// EncodingOf returns the encoding of objects of a kind, or of their metadata if as is PartialObjectMetadata.
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

// Item returns the bytes of an object in a list. data is its protobuf if f.Protobuf, and its JSON otherwise. In JSON,
// itemHead replaces the opening brace and itemTail follows. The bytes of a partial object are {"metadata":{… without
// the closing brace.
func (f *Encoding) Item(data []byte) ([]byte, error) {
	switch {
	case f.Partial && f.Protobuf:
		return f.metadataProtobuf(data)
	case f.Partial:
		return f.throughMetadata(data)
	}
	return data, nil
}

// itemHead returns the bytes that replace the opening brace of a list item in JSON, or nil. Protobuf has no such bytes.
func (f *Encoding) itemHead() []byte {
	switch {
	case f.Partial:
		return PartialHead(f.APIVersion)
	case f.Unstructured:
		return fmt.Appendf(nil, `{"apiVersion":%q,"kind":%q,`, f.APIVersion, f.Kind)
	}
	return nil
}

// itemTail returns the bytes after a list item in JSON, or nil. Protobuf has no such bytes.
func (f *Encoding) itemTail() []byte {
	if f.Partial {
		return braceJSON
	}
	return nil
}

var braceJSON = []byte{'}'}

// Items returns the items of a list. The bodies are as Item returns them.
func (f *Encoding) Items(bodies Bodies) *Items {
	return &Items{Bodies: bodies, Head: f.itemHead(), Tail: f.itemTail()}
}

// Event returns the watch frame of an object. data is as in Item.
func (f *Encoding) Event(event string, data []byte) ([]byte, error) {
	switch {
	case f.Partial && f.Protobuf:
		m, err := f.metadataProtobuf(data)
		if err != nil {
			return nil, err
		}
		return WatchProtobuf(event, Envelope(f.Kind, f.APIVersion, m)), nil
	case f.Partial:
		m, err := f.throughMetadata(data)
		if err != nil {
			return nil, err
		}
		return WatchJSON(event, slices.Concat(PartialHead(f.APIVersion), m[1:], braceJSON)), nil
	case f.Protobuf:
		return WatchProtobuf(event, Envelope(f.Kind, f.APIVersion, data)), nil
	}
	return WatchJSON(event, Object(f.Kind, f.APIVersion, data)), nil
}

// Bookmark returns the frame of a BOOKMARK event. initialEnd marks the end of the initial events.
func (f *Encoding) Bookmark(revision int64, initialEnd bool) []byte {
	if f.Protobuf {
		return WatchProtobuf("BOOKMARK", Envelope(f.Kind, f.APIVersion, bookmarkProtobuf(revision, initialEnd)))
	}
	return WatchJSON("BOOKMARK", Object(f.Kind, f.APIVersion, BookmarkJSON(revision, initialEnd)))
}

// Error returns the frame of the ERROR event that ends a watch.
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

// throughMetadata is ThroughMetadata without the omitted annotation.
func (f *Encoding) throughMetadata(body []byte) ([]byte, error) {
	through, err := ThroughMetadata(body)
	if err != nil || f.OmitAnnotation == "" {
		return through, err
	}
	return OmitAnnotation(through, f.OmitAnnotation)
}

// metadataProtobuf is MetadataProtobuf without the omitted annotation.
func (f *Encoding) metadataProtobuf(message []byte) ([]byte, error) {
	m, err := MetadataProtobuf(message)
	if err != nil || f.OmitAnnotation == "" {
		return m, err
	}
	return omitAnnotationProtobuf(m, f.OmitAnnotation)
}

// PartialHead returns the JSON of a PartialObjectMetadata up to its metadata.
func PartialHead(apiVersion string) []byte {
	return fmt.Appendf(nil, `{"kind":"PartialObjectMetadata","apiVersion":%q,`, apiVersion)
}
