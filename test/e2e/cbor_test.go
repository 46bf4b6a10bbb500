package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"

	"watershed.dev/test/harness"
)

// cborResponse is a response whose body may be CBOR. A watch has several items.
type cborResponse struct {
	code        int
	contentType string
	items       []any
}

// askCBOR sends a request whose body is CBOR if object is not nil.
func askCBOR(t *testing.T, s *harness.Server, method, path, contentType, accept string, object any) cborResponse {
	t.Helper()
	var body []byte
	if object != nil {
		var err error
		if body, err = direct.Marshal(object); err != nil {
			t.Fatal(err)
		}
	}
	req, err := http.NewRequest(method, s.Config().Host+path, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Accept", accept)
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	client, err := harness.HTTPClient(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	got := cborResponse{code: resp.StatusCode, contentType: resp.Header.Get("Content-Type")}
	if !strings.HasPrefix(got.contentType, "application/cbor") {
		text, _ := io.ReadAll(resp.Body)
		got.items = []any{string(text)}
		return got
	}
	frames := cbor.NewFramer().NewFrameReader(resp.Body)
	for buffer := make([]byte, 1<<20); ; {
		n, err := frames.Read(buffer)
		if errors.Is(err, io.EOF) {
			return got
		}
		if err != nil {
			t.Fatal(err)
		}
		var item map[string]any
		if err := direct.Unmarshal(buffer[:n], &item); err != nil {
			t.Fatalf("%s %s: %x: %v", method, path, buffer[:n], err)
		}
		if m, ok := item["metadata"].(map[string]any); ok && item["items"] != nil {
			delete(m, "resourceVersion") // other objects change meanwhile
		}
		got.items = append(got.items, item)
	}
}

// TestCBOR checks that the gate CBORServingAndStorage has kube-apiserver's responses. A server without the gate reads
// the custom resources that were stored with it.
func TestCBOR(t *testing.T) {
	t.Parallel()
	const gate, accept = "--feature-gates=CBORServingAndStorage=true", "application/cbor"
	dir := harness.TempDir(t)
	theirs := harness.KubeAPIServer(t, dir, harness.Etcd(t, dir), gate)
	ours, plain := theirs.Beside("", gate), theirs.Beside("")
	define(t, theirs.Server, widgetsDefinition("{strategy: None}"))
	theirs.Kubectl("create", "secret", "generic", "s", "--from-literal=k=v")
	const collection = "/apis/e2e.example.com/v1/namespaces/default/widgets"
	for name, s := range map[string]*harness.Server{"theirs": theirs.Server, "ours": ours} {
		w := widget("v1", name, map[string]any{"large": large})
		if got := askCBOR(t, s, "POST", collection, accept, accept, w.Object); got.code != http.StatusCreated {
			t.Fatalf("%s: %v", name, got)
		}
		delete(w.Object, "spec")
		w.SetLabels(map[string]string{"applied": "yes"})
		got := askCBOR(t, s, "PATCH", collection+"/"+name+"?fieldManager=m", "application/apply-patch+cbor", accept,
			w.Object)
		if got.code != http.StatusOK || got.contentType != accept {
			t.Errorf("%s: %v", name, got)
		}
		stored, err := harness.Etcdctl("--endpoints", theirs.Etcd, "get", "--print-value-only",
			"/registry/e2e.example.com/widgets/default/"+name).Output()
		if err != nil || !bytes.HasPrefix(stored, []byte{0xd9, 0xd9, 0xf7}) {
			t.Errorf("%s is stored as %q, %v", name, stored, err)
		}
	}
	const (
		secrets = "/api/v1/namespaces/default/secrets"
		watch   = "?watch=1&resourceVersion=0&timeoutSeconds=1"
		as      = accept + ";g=meta.k8s.io;v=v1;as="
	)
	for _, r := range []struct{ path, accept string }{
		{secrets + "/s", accept},
		{secrets, accept},
		{secrets, as + "PartialObjectMetadataList"},
		{secrets + "/x", accept},
		{secrets + watch, accept},
		{secrets + watch, "application/yaml"},
		{secrets + watch, "application/cbor-seq"},
		{collection + "/ours", accept},
		{collection + "/theirs", accept},
		{collection, accept},
		{collection + "?limit=1", as + "Table"},
		{collection + "/none", accept},
		{collection + watch, accept},
		{collection + watch, as + "PartialObjectMetadata"},
		{"/api", accept},
		{"/apis", accept},
		{"/apis/apps", accept},
		{"/apis/apps/v1", accept},
		{"/apis/e2e.example.com/v1", accept},
	} {
		harness.Eventually(t, harness.Soon, func() error { // until the caches have the writes
			want := askCBOR(t, theirs.Server, "GET", r.path, "", r.accept, nil)
			if got := askCBOR(t, ours, "GET", r.path, "", r.accept, nil); !reflect.DeepEqual(want, got) {
				return fmt.Errorf("%s: %s: %v, and kube-apiserver has %v", r.path, r.accept, got, want)
			}
			return nil
		})
	}
	if _, err := plain.TryKubectl("", "wait", "--for=jsonpath={.metadata.labels.applied}=yes", "widget/ours",
		"widget/theirs", "--timeout=2m"); err != nil {
		t.Errorf("a server without the gate: %v", err)
	}
	plain.Kubectl("annotate", "widget", "ours", "theirs", "by=plain")
	out := ours.Kubectl("get", "widgets", "-o", "jsonpath={.items[*].metadata.annotations.by}")
	if out != "plain plain" {
		t.Errorf("written without the gate: %q", out)
	}
}
