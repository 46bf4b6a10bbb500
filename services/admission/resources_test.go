package admission

import (
	"encoding/json"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
)

// served is a resource or subresource that upstream serves, and the operations that admission may review.
type served struct {
	resource    schema.GroupVersionResource
	subresource string
	kind        schema.GroupVersionKind
	namespaced  bool
	ops         []admission.Operation
}

func (s served) String() string {
	name := s.resource.Resource
	if s.subresource != "" {
		name += "/" + s.subresource
	}
	if s.resource.Group != "" {
		name = s.resource.Group + " " + name
	}
	return name
}

// connects are the subresources that are connections for every verb.
var connects = []string{"attach", "exec", "portforward", "proxy"}

// everyResource returns the resources that kube-apiserver serves in every version, including alpha and beta. It reads
// the discovery documents that upstream's own tests check. It adds custom resources, which no document lists.
func everyResource(t *testing.T) (all []served) {
	t.Helper()
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes").Output()
	if err != nil {
		t.Fatal(err)
	}
	// the document of a version, not of a group
	files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(dir)), "api/discovery/api*__v*.json"))
	if err != nil || len(files) < 20 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		var list metav1.APIResourceList
		if err := json.Unmarshal(data, &list); err != nil {
			t.Fatal(f, err)
		}
		gv, err := schema.ParseGroupVersion(list.GroupVersion)
		if err != nil {
			t.Fatal(f, err)
		}
		for _, r := range list.APIResources {
			s := served{namespaced: r.Namespaced, kind: gv.WithKind(r.Kind)}
			if r.Version != "" {
				s.kind = schema.GroupVersionKind{Group: r.Group, Version: r.Version, Kind: r.Kind}
			}
			name, sub, _ := strings.Cut(r.Name, "/")
			s.resource, s.subresource, s.ops = gv.WithResource(name), sub, opsOf(sub, r.Verbs)
			all = append(all, s)
		}
	}
	custom := schema.GroupVersion{Group: "example.com", Version: "v1"}
	verbs := []string{"create", "update", "delete"}
	for name, namespaced := range map[string]bool{"widgets": true, "globals": false} {
		for sub, verbs := range map[string][]string{"": verbs, "status": {"update"}, "scale": {"update"}} {
			all = append(all, served{
				resource:    custom.WithResource(name),
				subresource: sub,
				kind:        custom.WithKind("Custom"),
				namespaced:  namespaced,
				ops:         opsOf(sub, verbs),
			})
		}
	}
	return all
}

func opsOf(sub string, verbs []string) []admission.Operation {
	if slices.Contains(connects, sub) {
		return []admission.Operation{admission.Connect}
	}
	set := map[admission.Operation]bool{}
	for _, v := range verbs {
		switch v {
		case "create":
			set[admission.Create] = true
		case "update", "patch": // an update may create, and is then admitted as a creation
			set[admission.Update], set[admission.Create] = true, true
		case "delete", "deletecollection":
			set[admission.Delete] = true
		}
	}
	return slices.Sorted(maps.Keys(set))
}

// objectOf returns an empty object as the plugins receive it: of the internal version, or of a kind that is in no
// scheme.
func objectOf(k schema.GroupVersionKind) (runtime.Object, admission.ObjectInterfaces) {
	for _, entry := range schemes {
		for _, v := range []string{runtime.APIVersionInternal, k.Version} {
			if o, err := entry.scheme.New(k.GroupKind().WithVersion(v)); err == nil {
				return o, admission.NewObjectInterfacesFromScheme(entry.scheme)
			}
		}
	}
	return &unstructured.Unstructured{Object: map[string]any{}},
		admission.NewObjectInterfacesFromScheme(schemes[0].scheme)
}
