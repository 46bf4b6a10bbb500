// Package corruption writes values to etcd that etcd accepts and that no API server would write. The values are objects
// of every stored kind with unusual strings in all fields, and values that are not objects.
package corruption

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"reflect"
	"slices"
	"strings"

	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/test/integration/etcd"
)

// Value is a value to write to etcd.
type Value struct {
	// Kind is the expected kind, and Corruption is the name of the defect.
	Kind, Corruption string
	Resource         schema.GroupVersionResource
	Key              string
	Data             []byte
}

// Namespace contains all namespaced values. Lists of other namespaces must not be affected.
const Namespace = "corrupt"

// largeBytes is the approximate size of all strings of a large object. It is below etcd's limit.
const largeBytes = 1 << 20

// corruptions are unusual strings by name. n is the number of strings in an object.
var corruptions = map[string]func(n int) string{
	"no-utf8": func(int) string { return "\xff\xfe\xc3\x28" },
	"empty":   func(int) string { return "" },
	"control": func(int) string { return "\x00\x01\x1f\x7f\u2028\u2029\ufffe\"\\\r\n" },
	"angle":   func(n int) string { return strings.Repeat("<", min(4096, largeBytes/(6*n)+1)) },
	"large":   func(n int) string { return strings.Repeat("x", largeBytes/n+1) },
}

// notObjects returns values that are not objects of the kind. "half" is a truncated valid object.
func notObjects(sound []byte) map[string][]byte {
	return map[string][]byte{
		"garbage":         []byte("rubbish\x00\xff"),
		"no-bytes":        {},
		"half":            sound[:len(sound)/2],
		"unknown-version": []byte(`{"apiVersion":"nobody.example.com/v99","kind":"Nothing","metadata":{"name":"x"}}`),
		"other-type":      []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":7}}`),
		"deep":            []byte(strings.Repeat(`{"a":`, 20000) + "1" + strings.Repeat("}", 20000)),
	}
}

// Values returns the whole corpus in a stable order: every resource that kube-apiserver 1.36 stores by default, by
// upstream's own list of etcd paths.
func Values() ([]Value, error) {
	all := etcd.GetEtcdStorageDataForNamespace(Namespace)
	var out []Value
	byName := func(a, b schema.GroupVersionResource) int { return strings.Compare(a.String(), b.String()) }
	for _, gvr := range slices.SortedFunc(maps.Keys(all), byName) {
		data := all[gvr]
		sound, obj, err := stored(gvr, data.Stub, data.ExpectedGVK)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", gvr, err)
		}
		if obj == nil { // a custom resource of upstream's test
			continue
		}
		kind := gvr.GroupResource().String()
		dir := path.Dir(data.ExpectedEtcdPath)
		add := func(corruption string, value []byte) {
			out = append(
				out,
				Value{Kind: kind, Corruption: corruption, Resource: gvr, Key: dir + "/" + corruption, Data: value},
			)
		}
		for _, name := range slices.Sorted(maps.Keys(corruptions)) {
			odd := obj.DeepCopyObject()
			n := 0
			fill(reflect.ValueOf(odd), func() string { n++; return "x" }, 0)
			s := corruptions[name](max(n, 1))
			fill(reflect.ValueOf(odd), func() string { return s }, 0)
			setName(odd, name, strings.HasSuffix(dir, "/"+Namespace))
			value, err := encode(odd)
			if err != nil {
				return nil, fmt.Errorf("%s, %s: %w", kind, name, err)
			}
			add(name, value)
		}
		for _, name := range slices.Sorted(maps.Keys(notObjects(sound))) {
			add(name, notObjects(sound)[name])
		}
	}
	return out, nil
}

// CRD defines the custom resource of CustomResources.
const CRD = `
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.corrupt.example.com}
spec:
  group: corrupt.example.com
  names: {plural: things, singular: thing, kind: Thing}
  scope: Namespaced
  versions:
  - name: v1
    served: true
    storage: true
    additionalPrinterColumns: [{name: Text, type: string, jsonPath: .spec.text}]
    selectableFields: [{jsonPath: .spec.text}]
    schema:
      openAPIV3Schema:
        type: object
        properties:
          spec: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {text: {type: string}}}
`

// CustomResources returns corrupt objects of a custom resource, which etcd stores as JSON.
func CustomResources() []Value {
	resource := schema.GroupVersionResource{Group: "corrupt.example.com", Version: "v1", Resource: "things"}
	object := func(name, text string) []byte {
		return fmt.Appendf(
			nil,
			`{"apiVersion":"corrupt.example.com/v1","kind":"Thing","metadata":{"name":%q,"namespace":%q,`+
				`"labels":{"x":"%s"},"annotations":{"x":"%s"}},"spec":{"text":"%s","%s":["%s"]}}`,
			name,
			Namespace,
			text,
			text,
			text,
			text,
			text,
		)
	}
	var out []Value
	add := func(corruption string, value []byte) {
		out = append(out, Value{
			Kind:       resource.GroupResource().String(),
			Corruption: corruption,
			Resource:   resource,
			Key:        "/registry/corrupt.example.com/things/" + Namespace + "/" + corruption,
			Data:       value,
		})
	}
	add("no-utf8", object("no-utf8", "\xff\xfe"))
	add("empty", object("empty", ""))
	add("control", object("control", `\u0000\u0001\u2028\ud800`))
	add("angle", object("angle", strings.Repeat("<", 100_000)))
	add("large", object("large", strings.Repeat("x", largeBytes/5)))
	bad := notObjects(object("half", "x"))
	for _, name := range slices.Sorted(maps.Keys(bad)) {
		add(name, bad[name])
	}
	return out
}

// Count returns the number of different kinds of values.
func Count(values []Value) int {
	kinds := map[string]bool{}
	for _, v := range values {
		kinds[v.Kind] = true
	}
	return len(kinds)
}

func schemeOf(gvk schema.GroupVersionKind) *runtime.Scheme {
	for _, s := range []*runtime.Scheme{legacyscheme.Scheme, apiextensionsapiserver.Scheme, aggregatorscheme.Scheme} {
		if s.Recognizes(gvk) {
			return s
		}
	}
	return nil
}

// stored returns a valid object in its stored encoding. The object is nil if there is no Go type for it.
func stored(gvr schema.GroupVersionResource, stub string,
	stored *schema.GroupVersionKind) ([]byte, runtime.Object, error) {
	var gvk schema.GroupVersionKind
	if stored != nil {
		gvk = *stored
	} else {
		kind, ok := kindOf(gvr)
		if !ok {
			return nil, nil, nil
		}
		gvk = gvr.GroupVersion().WithKind(kind)
	}
	s := schemeOf(gvk)
	if s == nil {
		return nil, nil, nil
	}
	obj, err := s.New(gvk)
	if err != nil {
		return nil, nil, err
	}
	// A stub may have another version than the stored object, with fields that the stored version lacks. These fields
	// are left out.
	_ = json.Unmarshal([]byte(stub), obj)
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	data, err := encode(obj)
	return data, obj, err
}

// kindOf returns the kind of a resource.
func kindOf(gvr schema.GroupVersionResource) (string, bool) {
	for _, s := range []*runtime.Scheme{legacyscheme.Scheme, apiextensionsapiserver.Scheme, aggregatorscheme.Scheme} {
		for kind := range s.KnownTypes(gvr.GroupVersion()) {
			lower := strings.ToLower(kind)
			for _, plural := range []string{lower, lower + "s", lower + "es", strings.TrimSuffix(lower, "y") + "ies"} {
				if plural == gvr.Resource {
					return kind, true
				}
			}
		}
	}
	return "", false
}

func encode(obj runtime.Object) ([]byte, error) {
	gvk := obj.GetObjectKind().GroupVersionKind()
	var b bytes.Buffer
	if _, ok := obj.(interface{ Marshal() ([]byte, error) }); !ok { // CRDs are stored as JSON
		err := json.NewEncoder(&b).Encode(obj)
		return b.Bytes(), err
	}
	s := schemeOf(gvk)
	err := protobuf.NewSerializer(s, s).Encode(obj, &b)
	return b.Bytes(), err
}

// setName sets the name and namespace of an object's key. Without them no client could request the object.
func setName(obj runtime.Object, name string, namespaced bool) {
	m, ok := obj.(metav1.ObjectMetaAccessor)
	if !ok {
		return
	}
	m.GetObjectMeta().SetName(name)
	m.GetObjectMeta().SetNamespace("")
	if namespaced {
		m.GetObjectMeta().SetNamespace(Namespace)
	}
}

// fill sets every string in a value. It allocates pointers, and one element of each slice and map.
func fill(v reflect.Value, with func() string, depth int) {
	const deepest = 9
	if depth > deepest {
		return
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			if !v.CanSet() {
				return
			}
			v.Set(reflect.New(v.Type().Elem()))
		}
		fill(v.Elem(), with, depth+1)
	case reflect.Struct:
		if special(v.Type()) {
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() && v.Type().Field(i).Name != "TypeMeta" {
				fill(v.Field(i), with, depth+1)
			}
		}
	case reflect.String:
		if v.CanSet() {
			v.SetString(with())
		}
	case reflect.Slice:
		if v.Type().Elem().Kind() == reflect.Uint8 || !v.CanSet() {
			return
		}
		slice := reflect.MakeSlice(v.Type(), 1, 1)
		fill(slice.Index(0), with, depth+1)
		v.Set(slice)
	case reflect.Map:
		if !v.CanSet() || v.Type().Key().Kind() != reflect.String {
			return
		}
		m := reflect.MakeMap(v.Type())
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, with, depth+1)
		fill(value, with, depth+1)
		m.SetMapIndex(key, value)
		v.Set(m)
	}
}

// special returns true for types whose strings have a syntax.
func special(t reflect.Type) bool {
	switch t.String() {
	case "resource.Quantity",
		"v1.Time",
		"v1.MicroTime",
		"intstr.IntOrString",
		"runtime.RawExtension",
		"v1.FieldsV1",
		"v1.JSON",
		"v1.JSONSchemaProps":
		return true
	}
	return false
}
