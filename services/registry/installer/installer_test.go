package installer_test

import (
	"bytes"
	"encoding/json"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	corev1 "k8s.io/api/core/v1"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/installer"
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

// OpenAPI has a v3 document for each group version, group and page, and a v2 document of all of them.
func TestOpenAPI(t *testing.T) {
	set := fixture.New(t).Resources.BuiltIn
	aggregators, others, err := set.OpenAPIV2()
	if err != nil {
		t.Fatal(err)
	}
	v2 := maps.Clone(others.Paths.Paths)
	maps.Copy(v2, aggregators.Paths.Paths)
	roots := set.OpenAPIV3Roots()
	for _, root := range roots {
		var v3 struct {
			Paths map[string]any `json:"paths"`
		}
		data, err := set.OpenAPIV3(root)
		if err == nil {
			err = json.Unmarshal(data, &v3)
		}
		if err != nil || len(v3.Paths) == 0 {
			t.Errorf("%s: %v, %.100s", root, err, data)
		}
		for path := range v3.Paths {
			if _, ok := v2[path]; !ok || !strings.HasPrefix(path, "/"+root+"/") {
				t.Errorf("%s has %s", root, path)
			}
		}
	}
	for _, root := range []string{"api/v1", "apis/apps", "apis/apps/v1", "version"} {
		if !slices.Contains(roots, root) {
			t.Errorf("%s has no document", root)
		}
	}
	if data, err := set.OpenAPIV3("apis/none/v1"); data != nil || err != nil {
		t.Errorf("an unknown group version has a document: %.100s, %v", data, err)
	}
	if set.OpenAPIHash() == "" {
		t.Error("documents have no hash")
	}
	kept, err := set.OpenAPIV3("apis/apps/v1")
	definition := installer.PodSpecContainers(set)
	if definition.Value() == nil {
		t.Fatal("the set holds no definitions")
	}
	set.ReleaseOpenAPIDefinitions()
	runtime.GC()
	if definition.Value() != nil {
		t.Error("released definitions stay in memory")
	}
	if made, again := set.OpenAPIV3("apis/apps/v1"); err != nil || again != nil || !bytes.Equal(made, kept) {
		t.Errorf("a document differs after a release: %v, %v", err, again)
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

// The registry does not serve a kind that upstream has removed, even if --runtime-config enables its version.
func TestRemovedKindsAreNotServed(t *testing.T) {
	fx := fixture.New(t, "--runtime-config=admissionregistration.k8s.io/v1beta1=true")
	served := map[string]bool{}
	for _, e := range fx.Resources.BuiltIn.APIResources() {
		if e.Resource.Group == "admissionregistration.k8s.io" && e.Resource.Version == "v1beta1" {
			served[e.Resource.Resource] = true
		}
	}
	if !served["mutatingadmissionpolicies"] || served["validatingadmissionpolicies"] {
		t.Errorf("v1beta1 serves %v", served)
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

// The names of the core group in --runtime-config are the names that kube-apiserver accepts.
func TestTheCoreGroupHasSeveralNames(t *testing.T) {
	for _, value := range []string{"v1=false", "api/v1=false", "/v1=false", "api/v1=false,api/legacy=true"} {
		o := installer.NewOptions()
		if err := o.RuntimeConfig.Set(value); err != nil {
			t.Fatal(err)
		}
		config, err := o.APIResourceConfig()
		if err != nil || config.ResourceEnabled(corev1.SchemeGroupVersion.WithResource("pods")) {
			t.Errorf("%s: %v", value, err)
		}
	}
}
