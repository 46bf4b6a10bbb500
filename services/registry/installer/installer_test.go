package installer_test

import (
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// Every served resource has a complete discovery entry. Clients, the gateway and the watch tier have no other source.
func TestEveryResourceIsDescribed(t *testing.T) {
	fx := fixture.New(t)
	stored, subresources := 0, 0
	for _, e := range fx.Resources.BuiltIn.APIResources() {
		name := e.Resource.Group + "/" + e.Resource.Version + " " + e.Resource.Resource + "/" + e.Resource.Subresource
		if e.Kind.GetKind() == "" || len(e.Verbs)+len(e.ConnectMethods) == 0 || len(e.MediaTypes) == 0 &&
			len(e.ConnectMethods) == 0 {
			t.Errorf("%s: kind %v, verbs %v, media types %v", name, e.Kind, e.Verbs, e.MediaTypes)
		}
		if e.Unstructured {
			t.Errorf("%s is a custom resource", name)
		}
		if e.Resource.Subresource != "" {
			subresources++
			continue
		}
		if slices.Contains(e.Verbs, "watch") {
			stored++
			if e.StorageResource == "" || e.StoredKind.GetKind() == "" || e.ListKind == "" ||
				e.SelectableFields["metadata.name"] == "" || !e.Table {
				t.Errorf("%s is watched: %v", name, e)
			}
		}
		if _, ok := fx.Resources.BuiltIn.RequestScope(e.Resource); !ok {
			t.Errorf("%s is described and not served", name)
		}
	}
	if stored < 50 || subresources < 20 {
		t.Errorf("%d are watched, and there are %d subresources", stored, subresources)
	}
}

// OpenAPI has a v3 document for each group version, and a v2 document of all group versions.
func TestOpenAPI(t *testing.T) {
	fx := fixture.New(t)
	set := fx.Resources.BuiltIn
	for _, g := range set.Groups {
		for _, v := range g.Versions {
			path := "v3/apis/" + g.Name + "/" + v
			if g.Name == "" {
				path = "v3/api/" + v
			}
			doc, ok, err := set.OpenAPI(path)
			if !ok || err != nil || doc == nil {
				t.Errorf("%s: %v, %v", path, ok, err)
			}
		}
	}
	if _, ok, err := set.OpenAPI("v2"); !ok || err != nil {
		t.Errorf("v2: %v, %v", ok, err)
	}
	if _, ok, _ := set.OpenAPI("v3/apis/none/v1"); ok {
		t.Error("an unknown group version has a document")
	}
	if set.OpenAPIHash() == "" {
		t.Error("documents have no hash")
	}
}

// --runtime-config disables and enables versions.
func TestRuntimeConfig(t *testing.T) {
	versions := func(fx *fixture.Fixture, group string) string {
		for _, g := range fx.Resources.BuiltIn.Groups {
			if g.Name == group {
				return strings.Join(g.Versions, " ")
			}
		}
		return ""
	}
	fx := fixture.New(t, "--runtime-config=autoscaling/v1=false,resource.k8s.io/v1beta1=true")
	if got := versions(fx, "autoscaling"); got != "v2" {
		t.Errorf("autoscaling is served in %q", got)
	}
	if got := versions(fx, "resource.k8s.io"); !strings.Contains(got, "v1beta1") {
		t.Errorf("resource.k8s.io is served in %q", got)
	}
}

// An event has a lease of an hour in etcd.
func TestAnEventIsKeptForAnHour(t *testing.T) {
	w := fixture.New(t)
	events := &commonv1.Resource{Version: "v1", Resource: "events"}
	if _, err := w.Write(t.Context(), events, &registryv1.WriteRequest{Verb: "create", Body: []byte(
		`{"apiVersion":"v1","kind":"Event","metadata":{"name":"e"},"involvedObject":{"namespace":"x"}}`),
	}, &fixture.Callbacks{}); err != nil {
		t.Fatal(err)
	}
	etcd := w.Resources.Storage.Client.Client
	event, err := etcd.Get(t.Context(), "/registry/events/x/e")
	if err != nil || len(event.Kvs) != 1 {
		t.Fatal(event, err)
	}
	lease, err := etcd.TimeToLive(t.Context(), clientv3.LeaseID(event.Kvs[0].Lease))
	if err != nil || lease.TTL < 3500 || lease.TTL > 4000 { // upstream reuses a lease for a while
		t.Errorf("%+v, %v", lease, err)
	}
}
