// Package frame assembles Kubernetes' wire formats from encoded parts: list bodies, watch frames, Tables and
// PartialObjectMetadata, in JSON and in Kubernetes protobuf. It decodes no object except metadata with an annotation
// to omit, and starts no goroutine.
package frame

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strconv"

	"google.golang.org/protobuf/encoding/protowire"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// JSON and Protobuf are the media types of cached objects.
const (
	JSON     = "application/json"
	Protobuf = "application/vnd.kubernetes.protobuf"
)

// APIVersion returns the apiVersion of a kind: group/version, or the version only for the core group.
func APIVersion(k *commonv1.Kind) string {
	if k.GetGroup() == "" {
		return k.GetVersion()
	}
	return k.GetGroup() + "/" + k.GetVersion()
}

// Object returns an object's JSON with its kind and apiVersion. body is the JSON without both.
func Object(kind, apiVersion string, body []byte) []byte {
	dst := make([]byte, 0, len(`{"kind":"","apiVersion":"",`)+len(kind)+len(apiVersion)+len(body))
	dst = append(dst, `{"kind":"`...)
	dst = append(dst, kind...)
	dst = append(dst, `","apiVersion":"`...)
	dst = append(dst, apiVersion...)
	dst = append(dst, '"')
	if len(body) > 2 {
		dst = append(dst, ',')
	}
	return append(dst, body[1:]...)
}

// ThroughMetadata returns an object's JSON up to the end of its metadata, which must be the first key: {"metadata":{…}
func ThroughMetadata(body []byte) ([]byte, error) {
	const key = `{"metadata":`
	if len(body) < len(key)+2 || string(body[:len(key)]) != key {
		return nil, fmt.Errorf("metadata is not the first key of %.40q", body)
	}
	end, err := value(body, len(key))
	if err != nil {
		return nil, err
	}
	return body[:end], nil
}

// value returns the end of the JSON object that begins at i.
func value(b []byte, i int) (int, error) {
	depth := 0
	for ; i < len(b); i++ {
		switch b[i] {
		case '"':
			i = stringEnd(b, i) - 1
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth == 0 {
				return i + 1, nil
			}
		}
	}
	return 0, fmt.Errorf("unbalanced JSON")
}

// UID returns metadata.uid of an object's JSON, whose metadata must be its first key. An object without a UID has an
// empty UID.
func UID(body []byte) (uid string) {
	depth := 0
	for i := 0; i < len(body); i++ {
		switch body[i] {
		case '{', '[':
			depth++
		case '}', ']':
			if depth--; depth < 2 { // the metadata has ended
				return ""
			}
		case '"':
			end := stringEnd(body, i)
			if depth == 2 && string(body[i:min(end+1, len(body))]) == `"uid":` {
				_ = json.Unmarshal(body[end+1:stringEnd(body, end+1)], &uid)
				return uid
			}
			i = end - 1
		}
	}
	return ""
}

// stringEnd returns the end of the JSON string that begins at i.
func stringEnd(b []byte, i int) int {
	for i++; i < len(b) && b[i] != '"'; i++ {
		if b[i] == '\\' {
			i++
		}
	}
	return min(i+1, len(b))
}

// MetadataProtobuf returns field 1, the ObjectMeta, of an object's protobuf. The field is a complete
// PartialObjectMetadata.
func MetadataProtobuf(body []byte) ([]byte, error) {
	field, kind, head := protowire.ConsumeTag(body)
	if head < 0 || field != 1 || kind != protowire.BytesType {
		return nil, fmt.Errorf("metadata is not the first field")
	}
	_, n := protowire.ConsumeBytes(body[head:])
	if n < 0 {
		return nil, fmt.Errorf("metadata is cut short")
	}
	return body[:head+n], nil
}

// envelopeMagic is the prefix of every Kubernetes protobuf body.
var envelopeMagic = []byte("k8s\x00")

// tag appends the head of a length-delimited field of n bytes.
func tag(dst []byte, field protowire.Number, n int) []byte {
	return protowire.AppendVarint(protowire.AppendTag(dst, field, protowire.BytesType), uint64(n))
}

// fieldLen returns the encoded size of a length-delimited field of n bytes.
func fieldLen(n int) int { return protowire.SizeTag(1) + protowire.SizeBytes(n) }

// envelopeHead returns the envelope up to the object's message of n bytes. first appends the beginning of the message.
func envelopeHead(kind, apiVersion string, n int, first func([]byte) []byte) []byte {
	b := append([]byte{}, envelopeMagic...)
	b = tag(b, 1, fieldLen(len(apiVersion))+fieldLen(len(kind)))
	b = append(tag(b, 1, len(apiVersion)), apiVersion...)
	b = append(tag(b, 2, len(kind)), kind...)
	b = tag(b, 2, n)
	return first(b)
}

// TailProtobuf ends an envelope: contentEncoding and contentType, which are always present and empty.
var TailProtobuf = []byte{0x1a, 0, 0x22, 0}

// Envelope returns the Kubernetes protobuf body of one object.
func Envelope(kind, apiVersion string, message []byte) []byte {
	b := envelopeHead(kind, apiVersion, len(message), func(b []byte) []byte { return append(b, message...) })
	return append(b, TailProtobuf...)
}

// WatchJSON returns the watch frame of an object's JSON.
func WatchJSON(event string, object []byte) []byte {
	b := make([]byte, 0, len(object)+len(event)+26)
	b = append(append(append(b, `{"type":"`...), event...), `","object":`...)
	return append(append(b, object...), '}', '\n')
}

// WatchProtobuf returns the watch frame of an object's envelope: four bytes of length, then a metav1.WatchEvent.
func WatchProtobuf(event string, envelope []byte) []byte {
	raw := fieldLen(len(envelope))
	n := fieldLen(len(event)) + fieldLen(raw)
	b := make([]byte, 4, 4+n)
	binary.BigEndian.PutUint32(b, uint32(n))
	b = append(tag(b, 1, len(event)), event...)
	b = tag(b, 2, raw)
	return append(tag(b, 1, len(envelope)), envelope...)
}

// WatchJSONHead returns the part of a watch frame before an object's JSON, which follows without its opening brace.
// WatchJSONTail ends the frame.
func WatchJSONHead(event, kind, apiVersion string) []byte {
	return fmt.Appendf(nil, `{"type":%q,"object":{"kind":%q,"apiVersion":%q,`, event, kind, apiVersion)
}

// WatchJSONTail ends a watch frame in JSON.
var WatchJSONTail = []byte("}\n")

// WatchProtobufHead returns the part of a watch frame before an object's message of n bytes. TailProtobuf ends the
// frame.
func WatchProtobufHead(event, kind, apiVersion string, n int) []byte {
	meta := fieldLen(len(apiVersion)) + fieldLen(len(kind))
	envelope := len(envelopeMagic) + fieldLen(meta) + fieldLen(n) + len(TailProtobuf)
	raw := fieldLen(envelope)
	b := make([]byte, 4, 64+len(event)+meta)
	binary.BigEndian.PutUint32(b, uint32(fieldLen(len(event))+fieldLen(raw)))
	b = append(tag(b, 1, len(event)), event...)
	b = tag(tag(b, 2, raw), 1, envelope)
	b = tag(append(b, envelopeMagic...), 1, meta)
	b = append(tag(b, 1, len(apiVersion)), apiVersion...)
	b = append(tag(b, 2, len(kind)), kind...)
	return tag(b, 2, n)
}

// BookmarkJSON returns an object that has only the metadata of a bookmark, without its kind.
func BookmarkJSON(revision int64, initialEnd bool) []byte {
	b := strconv.AppendInt([]byte(`{"metadata":{"resourceVersion":"`), revision, 10)
	if initialEnd {
		return append(b, `","annotations":{"k8s.io/initial-events-end":"true"}}}`...)
	}
	return append(b, `"}}`...)
}

// bookmarkProtobuf returns an object's message that has only the ObjectMeta of a bookmark.
func bookmarkProtobuf(revision int64, initialEnd bool) []byte {
	rv := strconv.FormatInt(revision, 10)
	m := append(tag(nil, 6, len(rv)), rv...)
	if initialEnd {
		const k, v = "k8s.io/initial-events-end", "true"
		m = tag(m, 12, fieldLen(len(k))+fieldLen(len(v)))
		m = append(tag(m, 1, len(k)), k...)
		m = append(tag(m, 2, len(v)), v...)
	}
	return append(tag(nil, 1, len(m)), m...)
}
