package crd

import (
	"encoding/json"
	"runtime"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// decoded returns a decoded CRD with the versions v1 and v2.
func decoded(t *testing.T, uid, schema string) *apiextensionsv1.CustomResourceDefinition {
	t.Helper()
	names := `"plural":"things","singular":"thing","kind":"Thing","listKind":"ThingList"`
	text := `{"metadata":{"name":"things.example.com","uid":"` + uid + `"},"spec":{"group":"example.com","versions":[
		{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":` + schema + `}},
		{"name":"v2","served":true,"schema":{"openAPIV3Schema":{"type":"object"}}}],"names":{` + names + `}},
		"status":{"acceptedNames":{` + names + `}}}`
	d := &apiextensionsv1.CustomResourceDefinition{}
	if err := json.Unmarshal([]byte(text), d); err != nil {
		t.Fatal(err)
	}
	return d
}

const (
	one = `{"type":"object","properties":{"a":{"type":"string","default":"x"}}}`
	two = `{"type":"object","properties":{"b":{"type":"string"}}}`
)

func TestEqualSchemasOfACRDAreShared(t *testing.T) {
	first := decoded(t, "u1", one)
	Share(first)
	for name, c := range map[string]struct {
		uid, schema string
		v1, v2      bool
	}{
		"the same":          {"u1", one, true, true},
		"a version changed": {"u1", two, false, true},
		"another CRD":       {"u2", one, false, false},
	} {
		d := decoded(t, c.uid, c.schema)
		if _, err := Transform(d); err != nil {
			t.Fatal(err)
		}
		for i, want := range []bool{c.v1, c.v2} {
			if got := d.Spec.Versions[i].Schema == first.Spec.Versions[i].Schema; got != want {
				t.Errorf("%s: version %d is shared: %v", name, i+1, got)
			}
		}
		properties := d.Spec.Versions[0].Schema.OpenAPIV3Schema.Properties
		if _, ok := properties["a"]; ok != (c.schema == one) {
			t.Errorf("%s: it has another's properties: %v", name, properties)
		}
		Share(first) // the last that was shared is the next that is compared
	}
}

func TestSharedCRDsHaveNoManagedFields(t *testing.T) {
	d := decoded(t, "u5", one)
	d.ManagedFields = []metav1.ManagedFieldsEntry{{Manager: "kubectl"}}
	d.Annotations = map[string]string{corev1.LastAppliedConfigAnnotation: "{}"} // a status update stores it
	Share(d)
	if d.ManagedFields != nil || len(d.Annotations) != 1 {
		t.Errorf("managedFields %v, annotations %v", d.ManagedFields, d.Annotations)
	}
}

func TestCRDsShareStructuralSchemas(t *testing.T) {
	a, b, changed := decoded(t, "u3", one), decoded(t, "u3", one), decoded(t, "u3", two)
	preserving := decoded(t, "u3", one)
	preserving.Spec.PreserveUnknownFields = true
	var built []*structuralschema.Structural
	for _, d := range []*apiextensionsv1.CustomResourceDefinition{a, b, changed, preserving} {
		Share(d)
		c, err := New(d)
		if err != nil {
			t.Fatal(err)
		}
		s, err := c.Structural("v1")
		if err != nil {
			t.Fatal(err)
		}
		built = append(built, s)
	}
	if built[0] != built[1] {
		t.Error("equal CRDs have two structural schemas")
	}
	if built[0] == built[2] || built[0] == built[3] {
		t.Error("CRDs that are not equal share a structural schema")
	}
}

func TestSchemasAreForgottenWithTheirCRDs(t *testing.T) {
	key := version{types.UID("u4"), "v1"}
	func() {
		d := decoded(t, "u4", one)
		Share(d)
		if _, err := New(d); err != nil {
			t.Fatal(err)
		}
	}()
	for until := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		runtime.GC()
		schemas.mu.Lock()
		_, known := schemas.entries[key]
		schemas.mu.Unlock()
		if !known {
			return
		}
		if time.Now().After(until) {
			t.Fatal("the schema of a collected CRD is kept")
		}
	}
}
