package managed_test

import (
	"context"
	"fmt"
	"math/rand"
	"reflect"
	"testing"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/json"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kubernetes/pkg/apis/core"
	"sigs.k8s.io/randfill"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/managed"
)

// filler fills objects of any type. It uses few strings, so that lists contain equal elements.
func filler(seed int64) *randfill.Filler {
	text := func(c randfill.Continue) string {
		return []string{"", "a", "b", "80", "/x", "kubernetes.io/y", c.String(5)}[c.Intn(7)]
	}
	return randfill.NewWithSeed(seed).NilChance(0.4).NumElements(0, 3).MaxDepth(14).Funcs(
		func(s *string, c randfill.Continue) { *s = text(c) },
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewQuantity(c.Int63n(3), resource.DecimalSI)
		},
		func(i *intstr.IntOrString, c randfill.Continue) {
			*i = []intstr.IntOrString{intstr.FromInt32(0), intstr.FromInt32(7), intstr.FromString("http")}[c.Intn(3)]
		},
		func(r *metav1.Time, c randfill.Continue) { *r = metav1.Time{Time: times[c.Intn(4)]} },
		func(r *metav1.MicroTime, c randfill.Continue) { *r = metav1.MicroTime{Time: times[c.Intn(4)]} },
		func(r *runtime.RawExtension, c randfill.Continue) {
			r.Raw = []byte([]string{`{}`, `{"a":1}`, `{"a":{"b":["c"]}}`}[c.Intn(3)])
		},
		func(o *runtime.Object, _ randfill.Continue) { *o = nil },
		func(o *any, c randfill.Continue) {
			*o = []any{nil, "a", int64(1), []any{"a"}, map[string]any{"a": "b"}}[c.Intn(5)]
		},
		func(j *apiextensions.JSON, c randfill.Continue) {
			*j = []apiextensions.JSON{nil, "a", int64(1), []any{"a"}, map[string]any{"a": "b"}}[c.Intn(5)]
		},
		func(m *metav1.TypeMeta, _ randfill.Continue) { *m = metav1.TypeMeta{} },
		func(m *[]metav1.ManagedFieldsEntry, _ randfill.Continue) { *m = nil },
	)
}

// times holds two times and two zero times. A client can send a zero time with a zone.
var times = []time.Time{time.Unix(1, 0), time.Unix(2, 0), {}, time.Time{}.Local()}

const (
	// These are values of oneIn: change no value, only times, only strings outside lists, or all these strings to other
	// values.
	nothing, timesAlone, textAlone, everyText = -2, -1, 0, -3
)

// change changes some values of an object. A positive oneIn changes each value with the probability 1/oneIn.
func change(v reflect.Value, r *rand.Rand, inList bool, oneIn int) {
	changed := func() bool { return oneIn > 0 && r.Intn(oneIn) == 0 }
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() && v.Kind() == reflect.Pointer {
			change(v.Elem(), r, inList, oneIn)
		}
	case reflect.Struct:
		if at, ok := v.Addr().Interface().(*time.Time); ok {
			if oneIn == timesAlone || changed() {
				*at = times[r.Intn(len(times))]
			}
			return
		}
		for i := range v.NumField() {
			if f := v.Type().Field(i); f.IsExported() && f.Type != reflect.TypeFor[runtime.RawExtension]() {
				change(v.Field(i), r, inList, oneIn)
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			change(v.Index(i), r, true, oneIn)
		}
	case reflect.Map:
		for _, k := range v.MapKeys() {
			e := reflect.New(v.Type().Elem()).Elem()
			e.Set(v.MapIndex(k))
			change(e, r, inList, oneIn)
			v.SetMapIndex(k, e)
		}
	case reflect.String:
		switch {
		case v.String() != "" && !inList && oneIn == everyText:
			v.SetString(fmt.Sprint("every", r.Int()))
		case v.String() != "" && !inList && oneIn == textAlone || changed():
			v.SetString(fmt.Sprint("changed", r.Intn(3)))
		}
	case reflect.Bool:
		if changed() {
			v.SetBool(!v.Bool())
		}
	case reflect.Int32, reflect.Int64:
		if changed() {
			v.SetInt(int64(r.Intn(2)))
		}
	}
}

// fields formats an object's managedFields without their times. It fails the test if a time is not recent.
func fields(t *testing.T, obj runtime.Object) string {
	t.Helper()
	m, err := meta.Accessor(obj)
	if err != nil {
		return "no metadata"
	}
	out := ""
	for _, e := range m.GetManagedFields() {
		if e.Time == nil || time.Since(e.Time.Time) > time.Minute {
			t.Errorf("the time is %v", e.Time)
		}
		out += fmt.Sprintln(e.Manager, e.Operation, e.APIVersion, e.Subresource, e.FieldsType, e.FieldsV1)
	}
	return out
}

// managedScopes returns the scopes of all built-in resources whose objects have managedFields.
func managedScopes(t *testing.T) (scopes []*handlers.RequestScope) {
	t.Helper()
	builtIn := fixture.New(t).Resources.BuiltIn
	for _, apiResource := range builtIn.APIResources() {
		scope, ok := builtIn.RequestScope(apiResource.Resource)
		if ok && scope.FieldManager != nil && apiResource.Kind.GetKind() != "" {
			scopes = append(scopes, scope)
		}
	}
	return scopes
}

// Created objects have the managedFields that upstream's field manager computes. This holds for all built-in kinds and
// any content of the cache.
func TestCreatedFieldsAreUpstreams(t *testing.T) {
	kinds, same := 0, 0
	for _, scope := range managedScopes(t) {
		kinds++
		managed.ResetCache()
		for seed := range int64(12) {
			same += created(t, scope, seed)
		}
	}
	if kinds < 80 || same < 5*kinds {
		t.Errorf("%d kinds, %d objects had another's shape", kinds, same)
	}
}

// created compares Create with upstream for an object and for objects that are similar. It returns the number of
// similar objects with the same shape.
func created(t *testing.T, scope *handlers.RequestScope, seed int64) (same int) {
	t.Helper()
	obj, err := scope.UnsafeConvertor.ConvertToVersion(newOf(t, scope), scope.HubGroupVersion())
	if err != nil {
		t.Fatal(scope.Kind, err)
	}
	filler(seed).Fill(obj)
	r := rand.New(rand.NewSource(seed))
	first, ok := managed.ShapeOf(obj)
	for _, oneIn := range []int{nothing, timesAlone, timesAlone, textAlone, textAlone, 20, 5} {
		other := obj.DeepCopyObject()
		if oneIn != nothing {
			change(reflect.ValueOf(other), r, false, oneIn)
		}
		shape, cacheable := managed.ShapeOf(other)
		if ok && cacheable && oneIn >= textAlone && string(shape) == string(first) {
			same++
		}
		want := fields(t, scope.FieldManager.UpdateNoErrors(newOf(t, scope), other.DeepCopyObject(), "m"))
		for range 2 {
			got, err := scope.FieldManager.Create(func() (runtime.Object, error) { return newOf(t, scope), nil },
				other.DeepCopyObject(), "m")
			if err != nil {
				t.Fatal(scope.Kind, err)
			}
			if fields(t, got) != want {
				t.Fatalf("%v, seed %d, %d:\n%swant\n%s", scope.Kind, seed, oneIn, fields(t, got), want)
			}
		}
	}
	return same
}

func newOf(t *testing.T, scope *handlers.RequestScope) runtime.Object {
	t.Helper()
	obj, err := scope.Creater.New(scope.Kind)
	if err != nil {
		t.Fatal(scope.Kind, err)
	}
	return obj
}

// A custom resource's object is a map, and its schema defines the keys of its lists.
func TestCreatedFieldsOfCustomResources(t *testing.T) {
	types, err := managedfields.NewTypeConverter(map[string]*spec.Schema{"g.v.K": {
		VendorExtensible: spec.VendorExtensible{Extensions: spec.Extensions{
			"x-kubernetes-group-version-kind": []any{map[string]any{"group": "g", "version": "v", "kind": "K"}},
		}},
		SchemaProps: spec.SchemaProps{Type: []string{"object"}, Properties: map[string]spec.Schema{
			"metadata": {SchemaProps: spec.SchemaProps{Type: []string{"object"}}},
			"list": {
				VendorExtensible: spec.VendorExtensible{Extensions: spec.Extensions{
					"x-kubernetes-list-type":     "map",
					"x-kubernetes-list-map-keys": []any{"a", "b"},
				}},
				SchemaProps: spec.SchemaProps{Type: []string{"array"}, Items: &spec.SchemaOrArray{Schema: &spec.Schema{
					SchemaProps: spec.SchemaProps{Type: []string{"object"}, Properties: map[string]spec.Schema{
						"a": *spec.StringProperty(), "b": *spec.Int64Property(), "c": *spec.StringProperty(),
					}},
				}}},
			},
			"set": {
				VendorExtensible: spec.VendorExtensible{Extensions: spec.Extensions{"x-kubernetes-list-type": "set"}},
				SchemaProps: spec.SchemaProps{
					Type: []string{"array"}, Items: &spec.SchemaOrArray{Schema: spec.StringProperty()},
				},
			},
			"text": *spec.StringProperty(),
		}},
	}}, true)
	if err != nil {
		t.Fatal(err)
	}
	gvk := schema.GroupVersionKind{Group: "g", Version: "v", Kind: "K"}
	upstream, err := managedfields.NewDefaultCRDFieldManager(types, convertor{}, nil, nil, gvk, gvk.GroupVersion(), "",
		nil)
	if err != nil {
		t.Fatal(err)
	}
	m := managed.New(upstream)
	empty := func() (runtime.Object, error) {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(gvk)
		return u, nil
	}
	seen := map[string]bool{}
	for _, body := range []string{
		`{}`, `{"text":"a"}`, `{"text":"b"}`, `{"text":""}`, `{"text":null}`,
		`{"set":["a"]}`, `{"set":["b"]}`, `{"set":["a","b"]}`, `{"set":[]}`,
		`{"list":[{"a":"x","b":1,"c":"u"}]}`,
		`{"list":[{"a":"y","b":1,"c":"u"}]}`,
		`{"list":[{"a":"x","b":2,"c":"u"}]}`,
		`{"list":[{"a":"x","b":1}]}`,
		`{"list":[{"a":"x","b":1,"c":"v"}]}`,
		`{"list":[{"a":"x","b":1},{"a":"y","b":1}]}`,
		`{"unknown":{"a":[{"b":"c"}]}}`, `{"unknown":{"a":[{"b":"d"}]}}`, `{"unknown":{"b":[]}}`,
	} {
		decode := func() runtime.Object {
			u := &unstructured.Unstructured{}
			if err := json.Unmarshal([]byte(body), &u.Object); err != nil {
				t.Fatal(body, err)
			}
			u.SetGroupVersionKind(gvk)
			u.SetName("n")
			return u
		}
		live, _ := empty()
		want := fields(t, m.UpdateNoErrors(live, decode(), "m"))
		for range 2 {
			got, err := m.Create(empty, decode(), "m")
			if err != nil || fields(t, got) != want {
				t.Errorf("%s: %v\n%swant\n%s", body, err, fields(t, got), want)
			}
		}
		seen[want] = true
	}
	if len(seen) < 10 {
		t.Errorf("%d different sets of fields", len(seen))
	}
}

// convertor returns objects unchanged.
type convertor struct{ runtime.ObjectConvertor }

func (convertor) ConvertToVersion(in runtime.Object, _ runtime.GroupVersioner) (runtime.Object, error) {
	return in, nil
}

// mutating is an admission plugin that sets an object's managedFields.
type mutating struct {
	*admission.Handler
	to []metav1.ManagedFieldsEntry
}

func (m mutating) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if m.to != nil {
		a.GetObject().(metav1.Object).SetManagedFields(m.to)
	}
	return nil
}

// Validating keeps managedFields that admission has changed if they are valid. Otherwise it restores the previous
// managedFields.
func TestValidating(t *testing.T) {
	entry := func(manager, fields string) []metav1.ManagedFieldsEntry {
		return []metav1.ManagedFieldsEntry{{
			Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(fields),
		}}
	}
	for name, c := range map[string]struct {
		to   []metav1.ManagedFieldsEntry
		want string
	}{
		"nothing": {nil, "before"},
		"valid":   {entry("after", `{"f:a":{}}`), "after"},
		"invalid": {entry("after", `{"x"`), "before"},
		"changed": {entry("before", `{"x"`), "before"},
	} {
		obj := &metav1.PartialObjectMetadata{}
		obj.SetManagedFields(entry("before", `{"f:b":{}}`))
		v := managed.Validating{Interface: mutating{admission.NewHandler(admission.Create), c.to}}
		a := admission.NewAttributesRecord(obj, nil, schema.GroupVersionKind{}, "", "", schema.GroupVersionResource{},
			"", admission.Create, nil, false, nil)
		if err := v.Admit(t.Context(), a, nil); err != nil {
			t.Fatal(err)
		}
		got := obj.GetManagedFields()
		if len(got) != 1 || got[0].Manager != c.want || managedfields.ValidateManagedFields(got) != nil {
			t.Errorf("%s: %v", name, got)
		}
	}
}

// Upstream computes the managedFields of objects that cannot be cached. Examples are a manager's name that JSON changes
// and a shape that is too long.
func TestUncacheableIsUpstreams(t *testing.T) {
	fx := fixture.New(t)
	scope, _ := fx.Resources.BuiltIn.RequestScope(&commonv1.Resource{Version: "v1", Resource: "configmaps"})
	small := &core.ConfigMap{Data: map[string]string{"k": "v"}}
	large := &core.ConfigMap{Data: map[string]string{}}
	for i := range 20000 {
		large.Data[fmt.Sprint(i)] = ""
	}
	if _, ok := managed.ShapeOf(large); ok {
		t.Error("20,000 keys have a shape")
	}
	empty := func() (runtime.Object, error) { return newOf(t, scope), nil }
	for manager, obj := range map[string]*core.ConfigMap{"\xff": small, "": small, "m": large} {
		want := fields(t, scope.FieldManager.UpdateNoErrors(newOf(t, scope), obj.DeepCopyObject(), manager))
		for range 2 {
			got, err := scope.FieldManager.Create(empty, obj.DeepCopyObject(), manager)
			if err != nil || fields(t, got) != want {
				t.Errorf("%q: %v", manager, err)
			}
		}
	}
}

// BenchmarkCreate measures the managedFields of a new pod, with a cached shape and by upstream.
func BenchmarkCreate(b *testing.B) {
	fx := fixture.New(b)
	scope, _ := fx.Resources.BuiltIn.RequestScope(&commonv1.Resource{Version: "v1", Resource: "pods"})
	pod := &core.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Labels: map[string]string{"app": "a"}}}
	pod.Spec.Containers = []core.Container{{Name: "c", Image: "i"}}
	for i := range 40 {
		c := &pod.Spec.Containers[0]
		c.Env = append(c.Env, core.EnvVar{Name: fmt.Sprint("V", i), Value: "v"})
	}
	empty := func() (runtime.Object, error) { return scope.Creater.New(scope.Kind) }
	b.Run("known", func(b *testing.B) {
		for b.Loop() {
			pod.ManagedFields = nil
			_, _ = scope.FieldManager.Create(empty, pod, "m")
		}
	})
	b.Run("upstream", func(b *testing.B) {
		for b.Loop() {
			pod.ManagedFields = nil
			live, _ := empty()
			_ = scope.FieldManager.UpdateNoErrors(live, pod, "m")
		}
	})
}
