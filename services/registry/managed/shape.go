package managed

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// An object's shape is what its field set can depend on: which fields there are, the keys of maps and the order of
// lists, and of values those that may tell a list's elements apart: some of the elements' own fields do
// (x-kubernetes-list-map-keys), or they do themselves (sets). Of text outside of lists, and of maps' values, a shape has
// only whether there is some. All else, numbers and booleans among it, it has as it is: more than it needs tells two
// objects apart that have the same fields, which costs time; less would give an object another's fields.

// shapeOf appends an object's shape to dst; false where it has a part whose fields its JSON alone tells.
func shapeOf(dst []byte, obj runtime.Object) ([]byte, bool) {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return walkerOf(reflect.TypeOf(u.Object))(dst, reflect.ValueOf(u.Object), false)
	}
	v := reflect.ValueOf(obj)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return dst, false
	}
	return walkerOf(v.Type().Elem())(dst, v.Elem(), false)
}

// walker appends a value's shape. element says that the value is a list's element, or in one.
type walker func(dst []byte, v reflect.Value, element bool) ([]byte, bool)

var walkers sync.Map // reflect.Type to walker

func walkerOf(t reflect.Type) walker {
	if w, ok := walkers.Load(t); ok {
		return w.(walker)
	}
	// a type may be a part of itself: who needs it meanwhile takes this one
	var once sync.Once
	var made walker
	w, _ := walkers.LoadOrStore(t, walker(func(dst []byte, v reflect.Value, element bool) ([]byte, bool) {
		once.Do(func() { made = newWalker(t) })
		return made(dst, v, element)
	}))
	return w.(walker)
}

const (
	absent = iota
	empty
	present
)

var (
	marshaler = reflect.TypeFor[json.Marshaler]()
	// texts are types that are one value in JSON, and are told apart by their JSON where that matters.
	texts = map[reflect.Type]bool{
		reflect.TypeFor[metav1.Time]():        true,
		reflect.TypeFor[metav1.MicroTime]():   true,
		reflect.TypeFor[resource.Quantity]():  true,
		reflect.TypeFor[intstr.IntOrString](): true,
		reflect.TypeFor[metav1.Duration]():    true,
	}
	raw = reflect.TypeFor[runtime.RawExtension]()
)

func newWalker(t reflect.Type) walker {
	switch {
	case t.Kind() == reflect.Pointer: // it has its element's methods
		return pointerWalker(t)
	case texts[t]:
		return walkText
	case t == raw:
		return walkRaw
	case t.Implements(marshaler), reflect.PointerTo(t).Implements(marshaler):
		return refuse
	}
	switch t.Kind() {
	case reflect.Bool:
		return walkBool
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return func(dst []byte, v reflect.Value, _ bool) ([]byte, bool) {
			return binary.AppendVarint(dst, v.Int()), true
		}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return func(dst []byte, v reflect.Value, _ bool) ([]byte, bool) {
			return binary.AppendUvarint(dst, v.Uint()), true
		}
	case reflect.Float32, reflect.Float64:
		return func(dst []byte, v reflect.Value, _ bool) ([]byte, bool) {
			return binary.BigEndian.AppendUint64(dst, math.Float64bits(v.Float())), true
		}
	case reflect.String:
		return func(dst []byte, v reflect.Value, element bool) ([]byte, bool) {
			return appendString(dst, v.String(), element), true
		}
	case reflect.Struct:
		return structWalker(t)
	case reflect.Slice:
		return sliceWalker(t)
	case reflect.Map:
		return mapWalker(t)
	case reflect.Interface:
		return walkInterface
	}
	return refuse
}

func refuse(dst []byte, _ reflect.Value, _ bool) ([]byte, bool) { return dst, false }

func appendString(dst []byte, s string, whole bool) []byte {
	switch {
	case s == "":
		return append(dst, empty)
	case !whole:
		return append(dst, present)
	}
	return append(binary.AppendUvarint(append(dst, present), uint64(len(s))), s...)
}

func walkBool(dst []byte, v reflect.Value, _ bool) ([]byte, bool) {
	if v.Bool() {
		return append(dst, 1), true
	}
	return append(dst, 0), true
}

func walkText(dst []byte, v reflect.Value, element bool) ([]byte, bool) {
	if !element {
		if v.IsZero() {
			return append(dst, empty), true
		}
		return append(dst, present), true
	}
	data, err := json.Marshal(v.Interface())
	return appendString(dst, string(data), true), err == nil
}

// walkRaw takes all of what is JSON in a field's place, or refuses what is to become that.
func walkRaw(dst []byte, v reflect.Value, _ bool) ([]byte, bool) {
	r, _ := v.Interface().(runtime.RawExtension)
	return appendString(dst, string(r.Raw), true), r.Object == nil
}

func pointerWalker(t reflect.Type) walker {
	elem := walkerOf(t.Elem())
	return func(dst []byte, v reflect.Value, element bool) ([]byte, bool) {
		if v.IsNil() {
			return append(dst, absent), true
		}
		return elem(append(dst, present), v.Elem(), element)
	}
}

func structWalker(t reflect.Type) walker {
	var fields []walker
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			return refuse
		}
		fields = append(fields, walkerOf(f.Type))
	}
	return func(dst []byte, v reflect.Value, element bool) (_ []byte, ok bool) {
		for i, walk := range fields {
			if dst, ok = walk(dst, v.Field(i), element); !ok {
				return dst, false
			}
		}
		return dst, true
	}
}

// appendLength says how many a list or a map has, and whether it is there.
func appendLength(dst []byte, v reflect.Value) []byte {
	if v.IsNil() {
		return append(dst, absent)
	}
	return binary.AppendUvarint(append(dst, present), uint64(v.Len()))
}

func sliceWalker(t reflect.Type) walker {
	if t.Elem().Kind() == reflect.Uint8 {
		return func(dst []byte, v reflect.Value, element bool) ([]byte, bool) {
			if v.IsNil() {
				return append(dst, absent), true
			}
			return appendString(dst, string(v.Bytes()), element), true
		}
	}
	elem := walkerOf(t.Elem())
	return func(dst []byte, v reflect.Value, _ bool) (_ []byte, ok bool) {
		dst = appendLength(dst, v)
		for i := range v.Len() {
			if dst, ok = elem(dst, v.Index(i), true); !ok {
				return dst, false
			}
		}
		return dst, true
	}
}

func mapWalker(t reflect.Type) walker {
	if t.Key().Kind() != reflect.String {
		return refuse
	}
	elem := walkerOf(t.Elem())
	return func(dst []byte, v reflect.Value, element bool) (_ []byte, ok bool) {
		dst = appendLength(dst, v)
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int {
			switch a, b := a.String(), b.String(); {
			case a < b:
				return -1
			case a > b:
				return 1
			}
			return 0
		})
		for _, k := range keys {
			dst = appendString(dst, k.String(), true)
			// a custom resource's element is a map, whose values may be keys
			if dst, ok = elem(dst, v.MapIndex(k), element && t.Elem().Kind() == reflect.Interface); !ok {
				return dst, false
			}
		}
		return dst, true
	}
}

// walkInterface takes what JSON decodes to.
func walkInterface(dst []byte, v reflect.Value, element bool) ([]byte, bool) {
	if v.IsNil() {
		return append(dst, absent), true
	}
	v = v.Elem()
	switch kind := v.Kind(); kind {
	case reflect.Bool, reflect.String, reflect.Int64, reflect.Float64:
		return walkerOf(v.Type())(append(dst, byte(kind)), v, element)
	case reflect.Slice, reflect.Map:
		nested := v.Type().Elem().Kind() == reflect.Interface
		if !nested {
			return dst, false
		}
		return walkerOf(v.Type())(append(dst, byte(kind)), v, element)
	}
	return dst, false
}
