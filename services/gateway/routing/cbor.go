package routing

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
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

// eventSink returns s, or a sink that encodes the events of sourceOutput in CBOR before s.
func (c *requestContext) eventSink(s watch.Sink) watch.Sink {
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

// Write implements watch.Sink. It holds at most sliceBytes of encoded events, and an event.
func (s *cborSink) Write(ctx context.Context, timeout time.Duration, frames ...[]byte) error {
	var encoded [][]byte
	size := 0
	send := func() error {
		err := s.Sink.Write(ctx, timeout, encoded...)
		encoded, size = nil, 0
		return err
	}
	err := eachEvent(frames, s.source, func(event []byte) error {
		data, err := s.encode(event)
		if err != nil {
			slog.WarnContext(ctx, "A watch ends because its event cannot be encoded in CBOR", "error", err)
			return err
		}
		if encoded, size = append(encoded, data), size+len(data); size < sliceBytes {
			return nil
		}
		return send()
	})
	if err == nil && size > 0 {
		err = send()
	}
	return err
}

// Hijack implements watch.Sink. It returns nil, because a broadcast would write frames of the source's encoding.
func (s *cborSink) Hijack(context.Context) *h2writer.Stream { return nil }

var cborSerializer = cbor.NewSerializer(nil, nil)

// encode returns a JSON or protobuf event in CBOR. As in kube-apiserver (k8s.io/apiserver/pkg/endpoints/handlers), the
// order of a map's keys is random.
func (s *cborSink) encode(event []byte) ([]byte, error) {
	e := &metav1.WatchEvent{}
	obj, err := s.decode(event, e)
	if err != nil {
		return nil, err
	}
	var object, out bytes.Buffer
	if err := cborSerializer.EncodeNondeterministic(obj, &object); err != nil {
		return nil, err
	}
	e.Object.Raw = object.Bytes()
	err = cborSerializer.EncodeNondeterministic(e, &out)
	return out.Bytes(), err
}

// decode decodes an event and its object. It cuts a JSON object out of its event, because the event adds a level and
// the decoder accepts 10,000.
func (s *cborSink) decode(event []byte, e *metav1.WatchEvent) (runtime.Object, error) {
	if s.source == runtime.ContentTypeProtobuf {
		if err := e.Unmarshal(event); err != nil {
			return nil, err
		}
		return audit.DecodeProtobuf(e.Object.Raw)
	}
	head, object, ok := bytes.Cut(event, []byte(`,"object":`))
	if !ok {
		return nil, errors.New("an event of a watch has no object")
	}
	if err := kjson.UnmarshalCaseSensitivePreserveInts(append(bytes.Clone(head), '}'), e); err != nil {
		return nil, err
	}
	u := &unstructured.Unstructured{}
	object = bytes.TrimSuffix(bytes.TrimSpace(object), []byte("}"))
	return u, kjson.UnmarshalCaseSensitivePreserveInts(object, &u.Object)
}
