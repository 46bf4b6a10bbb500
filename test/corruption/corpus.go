// Package corruption puts into etcd what it accepts and nobody should have to expect: every stored kind with every string
// of it odd, and values that are no objects at all.
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

// Value is one thing to put into etcd.
type Value struct {
	// Kind is what it is meant to be, and Corruption what is odd about it.
	Kind, Corruption string
	Resource         schema.GroupVersionResource
	Key              string
	Data             []byte
}

// Namespace is where all of them are that have one. Lists of other namespaces must not notice.
const Namespace = "corrupt"

// largeBytes is about how much all strings of a large object come to: less than etcd takes.
const largeBytes = 1 << 20

// corruptions are the odd strings, by name; n is how many strings an object has.
var corruptions = map[string]func(n int) string{
	"no-utf8": func(int) string { return "\xff\xfe\xc3\x28" },
	"empty":   func(int) string { return "" },
	"control": func(int) string { return "\x00\x01\x1f\x7f\u2028\u2029\ufffe\"\\\r\n" },
	"angle":   func(n int) string { return strings.Repeat("<", min(4096, largeBytes/(6*n)+1)) },
	"large":   func(n int) string { return strings.Repeat("x", largeBytes/n+1) },
}

// notObjects are values that are nothing of the kind. half is cut from a sound one.
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

// Values is the whole corpus, in order: every resource that is stored by default in kube-apiserver 1.36, as upstream's
// own test of etcd's paths lists them.
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
		if obj == nil { // a custom resource of that test's own
			continue
		}
		kind := gvr.GroupResource().String()
		dir := path.Dir(data.ExpectedEtcdPath)
		add := func(corruption string, value []byte) {
			out = append(out, Value{Kind: kind, Corruption: corruption, Resource: gvr, Key: dir + "/" + corruption, Data: value})
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

// CRD defines the custom resource whose odd objects Customs are.
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
        properties: {spec: {type: object, x-kubernetes-preserve-unknown-fields: true, properties: {text: {type: string}}}}
`

// CustomResources are odd objects of a custom resource, which etcd holds in JSON.
func CustomResources() []Value {
	resource := schema.GroupVersionResource{Group: "corrupt.example.com", Version: "v1", Resource: "things"}
	object := func(name, text string) []byte {
		return fmt.Appendf(nil, `{"apiVersion":"corrupt.example.com/v1","kind":"Thing","metadata":{"name":%q,"namespace":%q,"labels":{"x":"%s"},"annotations":{"x":"%s"}},"spec":{"text":"%s","%s":["%s"]}}`,
			name, Namespace, text, text, text, text, text)
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

// Count is how many kinds the values are of.
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

// stored is a sound object as etcd holds it; a nil object where no Go type is known.
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
	// A stub is of the version that it is written in, which may name fields that the stored one lacks: what does not
	// fit is left out.
	_ = json.Unmarshal([]byte(stub), obj)
	obj.GetObjectKind().SetGroupVersionKind(gvk)
	data, err := encode(obj)
	return data, obj, err
}

// kindOf finds a resource's kind by the name that it has in the plural.
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
	if _, ok := obj.(interface{ Marshal() ([]byte, error) }); !ok { // definitions are stored in JSON
		err := json.NewEncoder(&b).Encode(obj)
		return b.Bytes(), err
	}
	s := schemeOf(gvk)
	err := protobuf.NewSerializer(s, s).Encode(obj, &b)
	return b.Bytes(), err
}

// setName gives an object the name and namespace that its key has, without which nobody could ask for it.
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

// fill sets every string that a value holds or could hold, pointers and one element of each slice and map among them.
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

// special are types whose strings are not free: they are read as something else.
func special(t reflect.Type) bool {
	switch t.String() {
	case "resource.Quantity", "v1.Time", "v1.MicroTime", "intstr.IntOrString", "runtime.RawExtension", "v1.FieldsV1", "v1.JSON", "v1.JSONSchemaProps":
		return true
	}
	return false
}
