package storage_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/world"
	"watershed.dev/services/registry/verbs"
)

// counted has the values counted that are read from etcd.
func counted(w *world.World) *reads {
	etcd := w.Resources.Storage.Client
	r := &reads{Interface: etcd.Kubernetes}
	etcd.Kubernetes = r
	return r
}

func TestAnAnswerIsKeptWhileItsObjectStaysAsItIs(t *testing.T) {
	w := world.New(t)
	read := counted(w)
	etcd := w.Resources.Storage.Client.Client
	const key = "/registry/configmaps/x/a"
	put := func(value string) {
		t.Helper()
		const object = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":"x","uid":"u"},` +
			`"data":{"k":%q}}`
		if _, err := etcd.Put(t.Context(), key, fmt.Sprintf(object, value)); err != nil {
			t.Fatal(err)
		}
	}
	told := func() { // as the event log tells of what is there now
		t.Helper()
		st, _ := w.Resources.Storage.ByName("configmaps")
		resp, err := etcd.Get(t.Context(), key)
		if err != nil || len(resp.Kvs) != 1 {
			t.Fatal(err)
		}
		kv := resp.Kvs[0]
		_, o, err := st.Read(t.Context(), key, kv.Value, kv.ModRevision)
		if err != nil {
			t.Fatal(err)
		}
		w.Resources.Storage.Written(&logv1.Event{
			Type:      logv1.Type_TYPE_MODIFIED,
			StoredAs:  "configmaps",
			Namespace: "x",
			Name:      "a",
			Revision:  kv.ModRevision,
			Object:    o,
		})
	}
	deleted := func() {
		t.Helper()
		if _, err := etcd.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	const asJSON, asProtobuf = "application/json", "application/vnd.kubernetes.protobuf"
	old := &registryv1.GetRequest{Query: "resourceVersion=1"}
	table := &registryv1.Output{
		MediaType: asJSON,
		As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"},
	}
	for _, step := range []struct {
		what   string
		before func()
		r      *registryv1.GetRequest
		reads  int
		want   string
	}{
		{"read", func() { put("1") }, &registryv1.GetRequest{}, 1, `"k":"1"`},
		{"kept", nil, &registryv1.GetRequest{}, 0, `"k":"1"`},
		{"kept, at any revision", nil, &registryv1.GetRequest{Query: "resourceVersion=0&timeout=3s"}, 0, `"k":"1"`},
		{"at a revision", nil, old, 1, `"k":"1"`},
		{"indented", nil, &registryv1.GetRequest{Output: &registryv1.Output{MediaType: asJSON, Pretty: true}}, 1, `"k": "1"`},
		{"as a Table", nil, &registryv1.GetRequest{Output: table}, 1, `"kind":"Table"`},
		{"as YAML", nil, &registryv1.GetRequest{Output: &registryv1.Output{MediaType: "application/yaml"}}, 1, "k: "},
		{"as protobuf", nil, &registryv1.GetRequest{Output: &registryv1.Output{MediaType: asProtobuf}}, 1, "k8s\x00"},
		{"as protobuf, kept", nil, &registryv1.GetRequest{Output: &registryv1.Output{MediaType: asProtobuf}}, 0, "k8s\x00"},
		{"and as JSON", nil, &registryv1.GetRequest{}, 0, `"k":"1"`},
		{"changed by another registry", func() { put("2") }, &registryv1.GetRequest{}, 1, `"k":"2"`},
		{"which the log tells of", func() { put("3"); told() }, &registryv1.GetRequest{}, 0, `"k":"3"`},
		{"before another change", func() { put("4"); told(); put("5") }, &registryv1.GetRequest{}, 1, `"k":"5"`},
		{"told of late", told, &registryv1.GetRequest{}, 0, `"k":"5"`},
		{"deleted", deleted, &registryv1.GetRequest{}, 1, "not found"},
		{"made anew as it was", func() { put("5") }, &registryv1.GetRequest{}, 1, `"k":"5"`},
		{"in another history", w.Resources.Storage.Forget, &registryv1.GetRequest{}, 1, `"k":"5"`},
		{"deleted, as the log tells", func() {
			w.Resources.Storage.Written(&logv1.Event{
				Type:      logv1.Type_TYPE_DELETED,
				StoredAs:  "configmaps",
				Namespace: "x",
				Name:      "a",
				Revision:  1 << 40,
				Object:    &logv1.Object{Json: []byte(`{"a":1}`)},
			})
		}, &registryv1.GetRequest{}, 1, `"k":"5"`},
	} {
		if step.before != nil {
			step.before()
		}
		read.n = 0
		step.r.Name = "a"
		resp, err := w.Get(t.Context(), world.ConfigMaps, step.r)
		got := string(resp.GetBody())
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, step.want) || read.n != step.reads {
			t.Errorf("%s: %q, want %s; %d values were read, want %d", step.what, got, step.want, read.n, step.reads)
		}
	}
}

// A name is one of its namespace, whatever is in it.
func TestAnAnswerIsOfItsPlace(t *testing.T) {
	w := world.New(t)
	for _, ns := range []string{"x", "x/a"} {
		key := "/registry/configmaps/" + ns + "/a"
		value := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":"x","uid":"` + ns + `"}}`
		if _, err := w.Resources.Storage.Client.Client.Put(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		resp, err := w.Get(t.Context(), world.ConfigMaps, &registryv1.GetRequest{Name: "a"})
		if err != nil || !strings.Contains(string(resp.Body), `"uid":"x"`) {
			t.Errorf("%s, %v", resp.GetBody(), err)
		}
		if resp, err := w.Get(t.Context(), world.ConfigMaps, &registryv1.GetRequest{Name: "a/a"}); err == nil {
			t.Errorf("%s", resp.Body)
		}
	}
}

// Of every kind, what the log carries is answered as what is read would be.
func TestAnswersOfTheLogAreThoseOfReading(t *testing.T) {
	w := world.New(t)
	read := counted(w)
	kinds := 0
	for _, entry := range w.Resources.BuiltIn.Entries() {
		e, ok := w.Resources.BuiltIn.Endpoint(entry.Resource)
		if !ok || e.Answers == nil {
			continue
		}
		kinds++
		for seed := range int64(6) {
			told := told(t, w, e, storedOf(t, e, seed))
			read.n = 0
			for mediaType, body := range told {
				if kept := get(t, w, e, mediaType); !bytes.Equal(kept, body) || read.n > 0 {
					t.Errorf("%v, seed %d, %s: %d reads, and answered is\n%q\nread is\n%q", e.Kind, seed, mediaType, read.n,
						kept, body)
				}
			}
		}
	}
	if kinds < 50 {
		t.Errorf("%d kinds", kinds)
	}
}

// storedOf is any object of an endpoint's kind, as etcd may have it.
func storedOf(t *testing.T, e *verbs.Endpoint, seed int64) []byte {
	t.Helper()
	obj, err := e.Creater.New(e.Kind)
	if err == nil {
		obj, err = e.UnsafeConvertor.ConvertToVersion(obj, e.Hub())
	}
	if err != nil {
		t.Fatal(e.Kind, err)
	}
	world.Filler(seed).Fill(obj)
	m, err := meta.Accessor(obj)
	if err != nil {
		t.Fatal(e.Kind, err)
	}
	m.SetName("a")
	m.SetNamespace(map[bool]string{true: "x"}[e.Namespaced])
	m.SetResourceVersion("")
	info, _ := runtime.SerializerInfoForMediaType(e.Serializer.SupportedMediaTypes(), runtime.ContentTypeJSON)
	var value bytes.Buffer
	if err := e.Serializer.EncoderForVersion(info.Serializer, e.Kind.GroupVersion()).Encode(obj, &value); err != nil {
		t.Fatal(e.Kind, seed, err)
	}
	return value.Bytes()
}

// told has the log tell of a change of an object that was asked for before, and says what is answered where it is read.
func told(t *testing.T, w *world.World, e *verbs.Endpoint, value []byte) map[string][]byte {
	t.Helper()
	st, _ := w.Resources.Storage.ByName(e.Entry.StoredAs)
	key, namespace := st.Prefix+"a", ""
	if e.Namespaced {
		key, namespace = st.Prefix+"x/a", "x"
	}
	put := func() int64 {
		t.Helper()
		resp, err := w.Resources.Storage.Client.Client.Put(t.Context(), key, string(value))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Header.Revision
	}
	put()
	asked := map[string][]byte{}
	for _, mediaType := range []string{runtime.ContentTypeJSON, runtime.ContentTypeProtobuf} {
		if slices.Contains(e.Entry.MediaTypes, mediaType) {
			asked[mediaType] = get(t, w, e, mediaType)
		}
	}
	revision := put()
	w.Resources.Storage.Forget()
	fresh := map[string][]byte{}
	for mediaType := range asked {
		fresh[mediaType] = get(t, w, e, mediaType)
	}
	w.Resources.Storage.Forget()
	for mediaType, body := range asked {
		e.Answers.Keep(namespace, "a", mediaType == runtime.ContentTypeProtobuf, revision-1, body)
	}
	_, o, err := st.Read(t.Context(), key, value, revision)
	if err != nil {
		t.Fatal(e.Kind, err)
	}
	w.Resources.Storage.Written(&logv1.Event{
		Type:      logv1.Type_TYPE_MODIFIED,
		StoredAs:  st.Name(),
		Namespace: namespace,
		Name:      "a",
		Revision:  revision,
		Object:    o,
	})
	return fresh
}

// get reads object a of an endpoint's kind.
func get(t *testing.T, w *world.World, e *verbs.Endpoint, mediaType string) []byte {
	t.Helper()
	resp, err := w.Get(t.Context(), e.Entry.Resource, &registryv1.GetRequest{
		Name:   "a",
		Output: &registryv1.Output{MediaType: mediaType},
	})
	if err != nil {
		t.Fatal(e.Kind, err)
	}
	return resp.Body
}
