package frame

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
)

func item(name string) metav1.PartialObjectMetadata {
	return metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Name:            name,
		ResourceVersion: "5",
		Annotations:     map[string]string{"a": `} " \ {`},
	}}
}

// The bytes equal the output of Kubernetes' own serializer.
func TestAProtobufListIsKubernetesOwn(t *testing.T) {
	remaining := int64(7)
	want := &metav1.PartialObjectMetadataList{
		TypeMeta: metav1.TypeMeta{Kind: "PartialObjectMetadataList", APIVersion: "meta.k8s.io/v1"},
		ListMeta: metav1.ListMeta{ResourceVersion: "12", Continue: "abc", RemainingItemCount: &remaining,
			ShardInfo: &metav1.ShardInfo{Selector: "shard"}},
		Items: []metav1.PartialObjectMetadata{item("a"), item("b")},
	}
	scheme := runtime.NewScheme()
	if err := metav1.AddMetaToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	s := protobuf.NewSerializer(scheme, scheme)
	var expected bytes.Buffer
	if err := s.Encode(want, &expected); err != nil {
		t.Fatal(err)
	}
	l := &List{
		Kind:       "PartialObjectMetadataList",
		APIVersion: "meta.k8s.io/v1",
		Revision:   12,
		Continue:   "abc",
		Remaining:  &remaining,
		ShardInfo:  "shard",
	}
	var items [][]byte
	for i := range want.Items {
		m, err := want.Items[i].Marshal()
		if err != nil {
			t.Fatal(err)
		}
		items = append(items, m)
	}
	var got []byte
	var size int64
	w := &Chunks{Bytes: 10, Send: func(pieces [][]byte, n int64) error {
		size += n
		got = append(got, bytes.Join(pieces, nil)...)
		return nil
	}}
	if err := l.Body(true, &Items{Bodies: Slices(items)}).Send(t.Context(), w); err != nil || size != int64(len(got)) {
		t.Errorf("said to be of %d bytes, it has %d: %v", size, len(got), err)
	}
	if !bytes.Equal(got, expected.Bytes()) {
		t.Errorf("got\n%x\nwant\n%x", got, expected.Bytes())
	}
	if _, _, err := s.Decode(got, &schema.GroupVersionKind{}, nil); err != nil {
		t.Error(err)
	}
}

func TestMetadataIsCutOutOfEitherEncoding(t *testing.T) {
	p := item("x")
	body, err := json.Marshal(map[string]any{"metadata": p.ObjectMeta, "spec": map[string]any{"metadata": "other"}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := ThroughMetadata(body)
	if err != nil {
		t.Fatal(err)
	}
	var got metav1.PartialObjectMetadata
	if err := json.Unmarshal(append(m[:len(m):len(m)], '}'), &got); err != nil ||
		got.Annotations["a"] != `} " \ {` {
		t.Errorf("%s: %v", m, err)
	}
	message, err := p.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	cut, err := MetadataProtobuf(append(message, 0x12, 1, 'x'))
	if err != nil || !bytes.Equal(cut, message) {
		t.Errorf("%x, %v", cut, err)
	}
	for _, bad := range []string{"", "{}", `{"spec":{}}`, `{"metadata":{"a":`} {
		if m, err := ThroughMetadata([]byte(bad)); err == nil {
			t.Errorf("%q gives %q", bad, m)
		}
	}
}

func TestWatchFramesDecode(t *testing.T) {
	f := WatchProtobuf("ADDED", Envelope("Pod", "v1", []byte{0x0a, 0}))
	if n := binary.BigEndian.Uint32(f); int(n) != len(f)-4 {
		t.Errorf("the length says %d of %d", n, len(f)-4)
	}
	var e metav1.WatchEvent
	if err := e.Unmarshal(f[4:]); err != nil || e.Type != "ADDED" || !bytes.HasPrefix(e.Object.Raw, []byte("k8s\x00")) {
		t.Errorf("%v %v", e, err)
	}
	j := WatchJSON("BOOKMARK", Object("Pod", "v1", BookmarkJSON(9, true)))
	var w struct {
		Type   string
		Object metav1.PartialObjectMetadata
	}
	if err := json.Unmarshal(j, &w); err != nil || w.Type != "BOOKMARK" || w.Object.Kind != "Pod" ||
		w.Object.ResourceVersion != "9" || w.Object.Annotations["k8s.io/initial-events-end"] != "true" {
		t.Errorf("%s: %v", j, err)
	}
	var p metav1.PartialObjectMetadata
	if err := p.Unmarshal(bookmarkProtobuf(9, true)); err != nil || p.ResourceVersion != "9" ||
		p.Annotations["k8s.io/initial-events-end"] != "true" {
		t.Errorf("%v %v", p, err)
	}
}

func TestAFrameInPiecesIsTheSameFrame(t *testing.T) {
	for _, n := range []int{0, 5, 200, 20000} {
		message := bytes.Repeat([]byte("m"), n)
		whole := WatchProtobuf("ADDED", Envelope("Pod", "v1", message))
		pieces := append(append(WatchProtobufHead("ADDED", "Pod", "v1", n), message...), TailProtobuf...)
		if !bytes.Equal(whole, pieces) {
			t.Errorf("%d bytes: %.80q, not %.80q", n, pieces, whole)
		}
	}
	body := []byte(`{"metadata":{"name":"a"}}`)
	whole := WatchJSON("ADDED", Object("Pod", "v1", body))
	pieces := append(append(WatchJSONHead("ADDED", "Pod", "v1"), body[1:]...), WatchJSONTail...)
	if !bytes.Equal(whole, pieces) {
		t.Errorf("%q, not %q", pieces, whole)
	}
}

// A list has its size before it is sent, because the gateway sends it as Content-Length.
func TestAListIsAsLongAsItSays(t *testing.T) {
	body, message := []byte(`{"metadata":{"name":"a"},"x":1}`), append([]byte{0x0a, 3, 0x0a, 1, 'a'}, 0x12, 1, 'x')
	for name, f := range map[string]Encoding{
		"typed":        {Kind: "Pod", APIVersion: "v1"},
		"unstructured": {Kind: "Widget", APIVersion: "g/v1", Unstructured: true},
		"partial":      {Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1", Partial: true},
		"protobuf":     {Kind: "Pod", APIVersion: "v1", Protobuf: true},
		"both":         {Kind: "PartialObjectMetadata", APIVersion: "meta.k8s.io/v1", Partial: true, Protobuf: true},
	} {
		for n := range 3 {
			var items Slices
			for range n {
				data := body
				if f.Protobuf {
					data = message
				}
				item, err := f.Item(data)
				if err != nil {
					t.Fatal(err)
				}
				items = append(items, item)
			}
			l := &List{Kind: f.Kind + "List", APIVersion: f.APIVersion, Revision: 7, Unstructured: f.Unstructured}
			var got []byte
			var said int64
			w := &Chunks{Bytes: 20, Send: func(pieces [][]byte, size int64) error {
				said += size
				got = append(got, bytes.Join(pieces, nil)...)
				return nil
			}}
			if err := l.Body(f.Protobuf, f.Items(items)).Send(t.Context(), w); err != nil || said != int64(len(got)) {
				t.Errorf("%s of %d: said to be of %d bytes, it has %d: %v", name, n, said, len(got), err)
			}
			var out struct{ Items []map[string]any }
			if !f.Protobuf && (json.Unmarshal(got, &out) != nil || len(out.Items) != n) {
				t.Errorf("%s of %d: %s", name, n, got)
			}
		}
	}
}

// The UID is that of the object itself, also in JSON that is cut short.
func TestUID(t *testing.T) {
	for body, want := range map[string]string{
		`{"metadata":{"name":"uid","uid":"a"},"uid":"b"}`:                               "a",
		`{"metadata":{"labels":{"uid":"b"},"ownerReferences":[{"uid":"c"}],"uid":"a"}}`: "a",
		`{"metadata":{"annotations":{"x":"\",\"uid\":\"b"},"uid":"\u0061"}}`:            "a",
		`{"metadata":{"name":"a"},"spec":{"uid":"b"}}`:                                  "",
		`{"metadata":{"uid":"`: "",
		`{"metadata":{"uid":`:  "",
		`{"metadata":{"uid"`:   "",
		`{}`:                   "",
		``:                     "",
	} {
		if got := UID([]byte(body)); got != want {
			t.Errorf("%s: %q", body, got)
		}
	}
}
