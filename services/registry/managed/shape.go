package managed

import (
	"encoding/binary"
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// An object's shape is what its field set can depend on: which fields there are, the keys of maps and the order of
// lists, and of values those that may tell a list's elements apart: some of the elements' own fields do
// (x-kubernetes-list-map-keys), or they do themselves (sets). Of text outside of lists, and of maps' values, a shape
// has only whether it is what an empty object has, which is nobody's. All else, numbers and booleans among it, it has
// as it is: more than it needs tells two objects apart that have the same fields, which costs time; less would give an
// object another's fields.

// shapeOf appends an object's shape to dst; false where only the JSON of some part tells which fields that has.
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
		return textWalker(t)
	case t == raw:
		return walkRaw
	case t.Implements(marshaler), reflect.PointerTo(t).Implements(marshaler):
		return unsupported
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
			return appendText(dst, v.String(), element)
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
	return unsupported
}

func unsupported(dst []byte, _ reflect.Value, _ bool) ([]byte, bool) { return dst, false }

// appendText appends whole text, or whether there is some; false where that makes the shape too long.
func appendText[T string | []byte](dst []byte, text T, whole bool) ([]byte, bool) {
	switch {
	case len(text) == 0:
		return append(dst, empty), true
	case !whole:
		return append(dst, present), true
	case len(dst)+len(text) > maxShapeBytes:
		return dst, false
	}
	return append(binary.AppendUvarint(append(dst, present), uint64(len(text))), text...), true
}

func walkBool(dst []byte, v reflect.Value, _ bool) ([]byte, bool) {
	if v.Bool() {
		return append(dst, 1), true
	}
	return append(dst, 0), true
}

// textWalker goes by JSON: a time that is zero in some zone is the null that it is without one.
func textWalker(t reflect.Type) walker {
	none, err := json.Marshal(reflect.Zero(t).Interface())
	if err != nil {
		return unsupported
	}
	return func(dst []byte, v reflect.Value, element bool) ([]byte, bool) {
		if !element && v.IsZero() {
			return append(dst, empty), true
		}
		data, err := json.Marshal(v.Interface())
		switch {
		case err != nil:
			return dst, false
		case !element && string(data) == string(none):
			return append(dst, empty), true
		case !element:
			return append(dst, present), true
		}
		return appendText(dst, data, true)
	}
}

// walkRaw takes all of what is JSON in a field's place, or refuses what is to become that.
func walkRaw(dst []byte, v reflect.Value, _ bool) ([]byte, bool) {
	r, _ := v.Interface().(runtime.RawExtension)
	if r.Object != nil {
		return dst, false
	}
	return appendText(dst, r.Raw, true)
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
			return unsupported
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
			return appendText(dst, v.Bytes(), element)
		}
	}
	elem := walkerOf(t.Elem())
	return func(dst []byte, v reflect.Value, _ bool) (_ []byte, ok bool) {
		dst = appendLength(dst, v)
		for i := range v.Len() {
			if len(dst) > maxShapeBytes {
				return dst, false
			}
			if dst, ok = elem(dst, v.Index(i), true); !ok {
				return dst, false
			}
		}
		return dst, true
	}
}

func mapWalker(t reflect.Type) walker {
	if t.Key().Kind() != reflect.String {
		return unsupported
	}
	elem := walkerOf(t.Elem())
	return func(dst []byte, v reflect.Value, element bool) (_ []byte, ok bool) {
		dst = appendLength(dst, v)
		if v.Len() > maxShapeBytes { // each key takes a byte at least
			return dst, false
		}
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			if dst, ok = appendText(dst, k.String(), true); !ok {
				return dst, false
			}
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
		if v.Type().Elem().Kind() != reflect.Interface {
			return dst, false
		}
		return walkerOf(v.Type())(append(dst, byte(kind)), v, element)
	}
	return dst, false
}
