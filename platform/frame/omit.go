package frame

import (
	"bytes"
	"encoding/json"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxOmitBytes is the size of metadata above which an annotation stays. Each list copies metadata to omit it.
const maxOmitBytes = 16 << 10

// OmitAnnotation returns the result of ThroughMetadata without an annotation. It decodes only metadata that may have
// the annotation. The fields keep their order and escapes, because the API server encodes metadata in the same way.
func OmitAnnotation(through []byte, key string) ([]byte, error) {
	if len(through) > maxOmitBytes || !bytes.Contains(through, []byte(key)) {
		return through, nil
	}
	var object struct {
		Metadata metav1.ObjectMeta `json:"metadata"`
	}
	if err := json.Unmarshal(append(bytes.Clone(through), '}'), &object); err != nil {
		return nil, err
	}
	delete(object.Metadata.Annotations, key)
	encoded, err := json.Marshal(object)
	return bytes.TrimSuffix(encoded, braceJSON), err
}

// omitAnnotationProtobuf is OmitAnnotation for the result of MetadataProtobuf.
func omitAnnotationProtobuf(message []byte, key string) ([]byte, error) {
	if len(message) > maxOmitBytes || !bytes.Contains(message, []byte(key)) {
		return message, nil
	}
	var object metav1.PartialObjectMetadata
	if err := object.Unmarshal(message); err != nil {
		return nil, err
	}
	delete(object.Annotations, key)
	return object.Marshal()
}
