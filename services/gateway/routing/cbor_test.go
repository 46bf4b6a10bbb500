package routing

import (
	"context"
	"encoding/binary"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"

	"watershed.dev/services/gateway/watch"
)

// sentFrames is a sink that records its frames.
type sentFrames struct {
	watch.Sink
	frames [][]byte
	writes int
}

func (s *sentFrames) Write(_ context.Context, _ time.Duration, frames ...[]byte) error {
	s.frames, s.writes = append(s.frames, frames...), s.writes+1
	return nil
}

// protobufFrame returns an event as a source encodes it.
func protobufFrame(t *testing.T, eventType string, obj runtime.Object) []byte {
	t.Helper()
	raw, err := runtime.Encode(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), obj)
	if err != nil {
		t.Fatal(err)
	}
	event := &metav1.WatchEvent{Type: eventType, Object: runtime.RawExtension{Raw: raw}}
	data, err := event.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return append(binary.BigEndian.AppendUint32(nil, uint32(len(data))), data...)
}

// Events of JSON and protobuf sources arrive in CBOR, each in its frame, with their byte strings and whole numbers.
func TestAWatchIsEncodedInCBOR(t *testing.T) {
	secret := &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Name: "a", Generation: 7},
		Data:       map[string][]byte{"k": {0, 0xff}},
	}
	status := &metav1.Status{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"},
		Code:     410,
	}
	sent := &sentFrames{}
	s := &cborSink{sent, runtime.ContentTypeProtobuf}
	frames := append(protobufFrame(t, "ADDED", secret), protobufFrame(t, "ERROR", status)...)
	if err := s.Write(t.Context(), time.Second, frames[:3], frames[3:50], frames[50:]); err != nil { // in pieces
		t.Fatal(err)
	}
	s = &cborSink{sent, runtime.ContentTypeJSON}
	if err := s.Write(t.Context(), time.Second,
		[]byte(`{"type":"ADDED","object":{"apiVersion":"v1","kind":"X","spec":{"n":12,"f":1.5}}}`+"\n"+
			`{"type":"BOOKMARK","object":{"apiVersion":"v1","kind":"X"}}`+"\n")); err != nil {
		t.Fatal(err)
	}
	if len(sent.frames) != 4 {
		t.Fatalf("%d frames", len(sent.frames))
	}
	var types []string
	objects := make([]map[string]any, len(sent.frames))
	for i, f := range sent.frames {
		var e metav1.WatchEvent
		if err := direct.Unmarshal(f, &e); err != nil {
			t.Fatalf("%x: %v", f, err)
		}
		types = append(types, e.Type)
		if err := direct.Unmarshal(e.Object.Raw, &objects[i]); err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			var got corev1.Secret
			_, _, err := cbor.NewSerializer(scheme.Scheme, scheme.Scheme).Decode(e.Object.Raw, nil, &got)
			if err != nil || string(got.Data["k"]) != string(secret.Data["k"]) || got.Generation != 7 {
				t.Errorf("%v, %v", got, err)
			}
		}
	}
	if want := []string{"ADDED", "ERROR", "ADDED", "BOOKMARK"}; !slices.Equal(types, want) {
		t.Errorf("%q", types)
	}
	if objects[1]["kind"] != "Status" || objects[1]["code"] != int64(410) {
		t.Errorf("%v", objects[1])
	}
	if spec := objects[2]["spec"].(map[string]any); spec["n"] != int64(12) || spec["f"] != 1.5 {
		t.Errorf("%v", spec)
	}
	deep := `{"type":"ADDED","object":{"x":` + strings.Repeat("[", 9998) + strings.Repeat("]", 9998) + "}}\n"
	if err := s.Write(t.Context(), time.Second, []byte(deep)); err != nil { // as deep as a request may be
		t.Error(err)
	}
	for _, bad := range [][]byte{{0, 0}, {0, 0, 0, 9, 1}, {0, 0, 0, 1, 0xff}} {
		if err := (&cborSink{sent, runtime.ContentTypeProtobuf}).Write(t.Context(), time.Second, bad); err == nil {
			t.Errorf("%x is written", bad)
		}
	}
}

// A watch in CBOR holds 64 KB of encoded events at most, and an event.
func TestCBOREventsAreSentInSlices(t *testing.T) {
	event := `{"type":"ADDED","object":{"x":"` + strings.Repeat("x", 20<<10) + `"}}` + "\n"
	sent := &sentFrames{}
	s := &cborSink{sent, runtime.ContentTypeJSON}
	if err := s.Write(t.Context(), time.Second, []byte(strings.Repeat(event, 8))); err != nil {
		t.Fatal(err)
	}
	if len(sent.frames) != 8 || sent.writes != 2 {
		t.Errorf("%d events in %d writes", len(sent.frames), sent.writes)
	}
}
