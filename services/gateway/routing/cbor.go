package routing

import (
	"bytes"
	"context"
	"slices"
	"time"

	"google.golang.org/protobuf/proto"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	kjson "sigs.k8s.io/json"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/watch"
)

// sourceOutput returns the encoding of the events that the gateway reads for the watch. No source has CBOR, so the
// gateway makes it from protobuf, which has byte strings as CBOR has, or from JSON.
func (c *requestContext) sourceOutput() *registryv1.Output {
	if c.out.MediaType != runtime.ContentTypeCBOR {
		return c.out
	}
	out := proto.CloneOf(c.out)
	out.MediaType, out.Pretty = runtime.ContentTypeJSON, false
	if !c.apiResource.Unstructured && slices.Contains(c.apiResource.MediaTypes, runtime.ContentTypeProtobuf) {
		out.MediaType = runtime.ContentTypeProtobuf
	}
	return out
}

// encoded returns the sink of a watch's frames.
func (c *requestContext) encoded(s watch.Sink) watch.Sink {
	if c.out.MediaType != runtime.ContentTypeCBOR {
		return s
	}
	return &cborSink{s, c.sourceOutput().MediaType}
}

// cborSink encodes each event in CBOR before it sends it. Each CBOR watch costs a decode and an encode of each event:
// unlike the other encodings, watches do not share it.
type cborSink struct {
	watch.Sink
	source string // the media type of the frames
}

// Write implements watch.Sink.
func (s *cborSink) Write(ctx context.Context, timeout time.Duration, frames ...[]byte) error {
	return eachEvent(frames, s.source, func(event []byte) error {
		data, err := s.encode(event)
		if err != nil {
			return err
		}
		return s.Sink.Write(ctx, timeout, data)
	})
}

// Hijack implements watch.Sink. No other goroutine may write frames that are not CBOR.
func (s *cborSink) Hijack(context.Context) *h2writer.Stream { return nil }

var cborSerializer = cbor.NewSerializer(nil, nil)

// encode returns a JSON or protobuf event in CBOR. As in kube-apiserver, the order of a map's keys is random.
func (s *cborSink) encode(event []byte) ([]byte, error) {
	eventType, obj, err := s.decode(event)
	if err != nil {
		return nil, err
	}
	var object, out bytes.Buffer
	if err := cborSerializer.EncodeNondeterministic(obj, &object); err != nil {
		return nil, err
	}
	err = cborSerializer.EncodeNondeterministic(&metav1.WatchEvent{
		Type:   eventType,
		Object: runtime.RawExtension{Raw: object.Bytes()},
	}, &out)
	return out.Bytes(), err
}

func (s *cborSink) decode(event []byte) (eventType string, obj runtime.Object, err error) {
	if s.source == runtime.ContentTypeProtobuf {
		e := &metav1.WatchEvent{}
		if err := e.Unmarshal(event); err != nil {
			return "", nil, err
		}
		obj, err := audit.DecodeProtobuf(e.Object.Raw)
		return e.Type, obj, err
	}
	var e struct {
		Type   string         `json:"type"`
		Object map[string]any `json:"object"`
	}
	err = kjson.UnmarshalCaseSensitivePreserveInts(event, &e)
	return e.Type, &unstructured.Unstructured{Object: e.Object}, err
}
