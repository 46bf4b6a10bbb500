package frame

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// An annotation is omitted from metadata in both encodings, in lists and in events. All other bytes stay.
func TestOmittedAnnotation(t *testing.T) {
	const key, other = "example.com/generation", "example.com/<other>"
	metadata := func(annotations map[string]string) metav1.PartialObjectMetadata {
		return metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
			Name:              "a",
			CreationTimestamp: metav1.NewTime(time.Unix(1, 0)),
			Labels:            map[string]string{"l": key},
			Annotations:       annotations,
			OwnerReferences:   []metav1.OwnerReference{{Name: `"}`}},
			ManagedFields: []metav1.ManagedFieldsEntry{{
				FieldsType: "FieldsV1",
				FieldsV1:   metav1.NewFieldsV1(`{"f:metadata":{"f:annotations":{"f:` + key + `":{}}}}`),
			}},
		}}
	}
	encode := func(annotations map[string]string) (body, message []byte) {
		t.Helper()
		p := metadata(annotations)
		body, err := json.Marshal(map[string]any{"metadata": p.ObjectMeta, "spec": map[string]any{key: "1"}})
		if err != nil {
			t.Fatal(err)
		}
		if message, err = p.Marshal(); err != nil {
			t.Fatal(err)
		}
		return body, append(message, 0x12, 1, 'x')
	}
	for name, c := range map[string]struct{ stored, want map[string]string }{
		"alone":           {map[string]string{key: "1"}, nil},
		"beside another":  {map[string]string{key: "1", other: "2"}, map[string]string{other: "2"}},
		"only another":    {map[string]string{other: "2"}, map[string]string{other: "2"}},
		"no annotations":  {nil, nil},
		"another's value": {map[string]string{other: key}, map[string]string{other: key}},
	} {
		body, message := encode(c.stored)
		wantBody, wantMessage := encode(c.want)
		for _, protobuf := range []bool{false, true} {
			f := Encoding{Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1", Partial: true, Protobuf: protobuf}
			data, wantData := body, wantBody
			if protobuf {
				data, wantData = message, wantMessage
			}
			wantItem, err := f.Item(wantData)
			if err != nil {
				t.Fatal(err)
			}
			wantEvent, err := f.Event("ADDED", wantData)
			if err != nil {
				t.Fatal(err)
			}
			f.OmitAnnotation = key
			if got, err := f.Item(data); err != nil || string(got) != string(wantItem) {
				t.Errorf("%s, protobuf %v: %q, %v, not %q", name, protobuf, got, err, wantItem)
			}
			if got, err := f.Event("ADDED", data); err != nil || string(got) != string(wantEvent) {
				t.Errorf("%s, protobuf %v: %q, %v, not %q", name, protobuf, got, err, wantEvent)
			}
			f.Partial = false
			if got, err := f.Item(data); err != nil || len(got) != len(data) {
				t.Errorf("%s, protobuf %v: the whole object is changed: %q, %v", name, protobuf, got, err)
			}
		}
	}
	large := []byte(`{"metadata":{"annotations":{"` + key + `":"` + strings.Repeat("1", maxOmitBytes) + `"}}`)
	if got, err := OmitAnnotation(large, key); err != nil || &got[0] != &large[0] {
		t.Errorf("large metadata is copied (%v)", err)
	}
	if _, err := OmitAnnotation([]byte(`{"metadata":{"annotations":["`+key+`"]}`), key); err == nil {
		t.Error("invalid metadata is returned")
	}
	if _, err := omitAnnotationProtobuf(append([]byte{0x0a, 100}, key...), key); err == nil {
		t.Error("an invalid message is returned")
	}
}
