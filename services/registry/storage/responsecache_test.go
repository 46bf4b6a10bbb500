package storage_test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// countReads counts the values that are read from etcd.
func countReads(fx *fixture.Fixture) *countingClient {
	etcd := fx.Resources.Storage.Client
	r := &countingClient{Interface: etcd.Kubernetes}
	etcd.Kubernetes = r
	return r
}

func TestResponseCache(t *testing.T) {
	fx := fixture.New(t)
	client := countReads(fx)
	etcd := fx.Resources.Storage.Client.Client
	const key = "/registry/configmaps/x/a"
	put := func(value string) {
		t.Helper()
		const object = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","namespace":"x","uid":"u"},` +
			`"data":{"k":%q}}`
		if _, err := etcd.Put(t.Context(), key, fmt.Sprintf(object, value)); err != nil {
			t.Fatal(err)
		}
	}
	written := func(revision int64) {
		fx.Resources.Storage.Invalidate(&logv1.Event{StorageResource: "configmaps", Namespace: "x", Name: "a",
			Revision: revision})
	}
	deleted := func() {
		t.Helper()
		if _, err := etcd.Delete(t.Context(), key); err != nil {
			t.Fatal(err)
		}
	}
	const asJSON, asProtobuf = "application/json", "application/vnd.kubernetes.protobuf"
	old := &registryv1.GetRequest{Query: "resourceVersion=1"}
	as := func(out *registryv1.Output) *registryv1.GetRequest { return &registryv1.GetRequest{Output: out} }
	pretty := &registryv1.Output{MediaType: asJSON, Pretty: true}
	yaml := &registryv1.Output{MediaType: "application/yaml"}
	protobuf := &registryv1.Output{MediaType: asProtobuf}
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
		{"cached", nil, &registryv1.GetRequest{}, 0, `"k":"1"`},
		{"cached, at any revision", nil, &registryv1.GetRequest{Query: "resourceVersion=0&timeout=3s"}, 0, `"k":"1"`},
		{"at a revision", nil, old, 1, `"k":"1"`},
		{"indented", nil, as(pretty), 1, `"k": "1"`},
		{"as a Table", nil, as(table), 1, `"kind":"Table"`},
		{"as YAML", nil, as(yaml), 1, "k: "},
		{"as protobuf", nil, as(protobuf), 1, "k8s\x00"},
		{"as protobuf, cached", nil, as(protobuf), 0, "k8s\x00"},
		{"and as JSON", nil, &registryv1.GetRequest{}, 0, `"k":"1"`},
		{"changed by another registry", func() { put("2") }, &registryv1.GetRequest{}, 1, `"k":"2"`},
		{"a late event", func() { written(2) }, &registryv1.GetRequest{}, 0, `"k":"2"`},
		{"an event of a later change", func() { put("5"); written(1 << 40) }, &registryv1.GetRequest{}, 1, `"k":"5"`},
		{"deleted", deleted, &registryv1.GetRequest{}, 1, "not found"},
		{"created again", func() { put("5") }, &registryv1.GetRequest{}, 1, `"k":"5"`},
		{"in another epoch", fx.Resources.Storage.ClearCaches, &registryv1.GetRequest{}, 1, `"k":"5"`},
		{"cached again", nil, &registryv1.GetRequest{}, 0, `"k":"5"`},
		{"in another epoch that the log has not delivered", func() { fx.Resources.Storage.SetLatestRevision(1 << 40) },
			&registryv1.GetRequest{}, 1, `"k":"5"`},
		{"cached in that epoch", nil, &registryv1.GetRequest{}, 0, `"k":"5"`},
		{"too large for the cache", func() { put(strings.Repeat("6", 1<<20)) }, &registryv1.GetRequest{}, 1, `"k":"66`},
		{"and read again", nil, &registryv1.GetRequest{}, 1, `"k":"66`},
	} {
		if step.before != nil {
			step.before()
		}
		client.n = 0
		step.r.Name = "a"
		resp, err := fx.Get(t.Context(), fixture.ConfigMaps, step.r)
		got := string(resp.GetBody())
		if err != nil {
			got = err.Error()
		}
		if !strings.Contains(got, step.want) || client.n != step.reads {
			t.Errorf("%s: %q, want %s; %d values were read, want %d", step.what, got, step.want, client.n, step.reads)
		}
	}
}

// Encrypted objects are decrypted for each GET, because a removed key must not be bypassed.
func TestEncryptedIsNotCached(t *testing.T) {
	file := filepath.Join(t.TempDir(), "encryption.yaml")
	const config = "apiVersion: apiserver.config.k8s.io/v1\nkind: EncryptionConfiguration\nresources:\n" +
		"- resources: [secrets]\n  providers:\n  - aescbc:\n      keys:\n" +
		"      - {name: k, secret: AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA=}\n"
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	fx := fixture.New(t, "--encryption-provider-config="+file)
	secrets := &commonv1.Resource{Version: "v1", Resource: "secrets"}
	for _, resource := range []*commonv1.Resource{secrets, fixture.ConfigMaps} {
		if _, err := fx.Write(t.Context(), resource, &registryv1.WriteRequest{
			Verb: "create",
			Body: []byte(`{"metadata":{"name":"a"}}`),
		}, &fixture.Callbacks{}); err != nil {
			t.Fatal(err)
		}
	}
	client := countReads(fx)
	for _, step := range []struct {
		of    *commonv1.Resource
		reads int
	}{
		{fixture.ConfigMaps, 1}, {fixture.ConfigMaps, 0},
		{secrets, 1}, {secrets, 1}, {fixture.ConfigMaps, 0},
	} {
		client.n = 0
		resp, err := fx.Get(t.Context(), step.of, &registryv1.GetRequest{Name: "a"})
		if err != nil || !strings.Contains(string(resp.Body), `"name":"a"`) || client.n != step.reads {
			t.Errorf("%s: %s, %v; %d values were read, want %d",
				step.of.Resource, resp.GetBody(), err, client.n, step.reads)
		}
	}
}

// A response belongs to its namespace and name, also if two invalid names have the same key in etcd.
func TestResponseCacheKey(t *testing.T) {
	fx := fixture.New(t)
	scope, ok := fx.Resources.BuiltIn.RequestScope(fixture.ConfigMaps)
	if !ok {
		t.Fatal("no request scope")
	}
	resp, err := fx.Resources.Storage.Client.Client.Put(t.Context(), "/registry/configmaps/x/a/b", "{}")
	if err != nil {
		t.Fatal(err)
	}
	scope.ResponseCache.Put("x/a", "b", false, resp.Header.Revision, []byte("of another namespace"))
	if resp, err := fx.Get(t.Context(), fixture.ConfigMaps, &registryv1.GetRequest{Name: "a/b"}); err == nil {
		t.Errorf("%s", resp.Body)
	}
}
