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

// An object's shape contains everything that its field set can depend on: its fields, the keys of maps, the order of
// lists, and some values. A value matters if it can identify an element of a list. Such a value is an element of a set,
// or a field of an element (x-kubernetes-list-map-keys).
//
// For strings outside lists and for values of maps, a shape contains only whether the string is empty. An empty string
// has no manager, as in an empty object. A shape contains all other values, such as numbers and booleans, as they are.
//
// A shape with too much in it differs for objects with equal fields, which costs time. A shape with too little in it
// would give an object the fields of another object.

// shapeOf appends an object's shape to dst. It returns false if the shape is too long, or if only the JSON of some part
// has that part's fields.
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

// walker appends a value's shape to dst. element reports whether the value is a list's element, or part of an element.
type walker func(dst []byte, v reflect.Value, element bool) ([]byte, bool)

var walkers sync.Map // reflect.Type to walker

func walkerOf(t reflect.Type) walker {
	if w, ok := walkers.Load(t); ok {
		return w.(walker)
	}
	// a type may contain itself: other callers use this walker while newWalker runs
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
	// texts contains the types that JSON encodes as a single value. In a list's element, the shape contains their JSON.
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
	case t.Kind() == reflect.Pointer: // a pointer has its element's methods
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

// appendText appends text if whole is set, otherwise whether text is empty. It returns false if the shape is too long.
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

// textWalker returns a walker that compares JSON, because JSON encodes a zero time of any zone as null.
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

// walkRaw appends the JSON of a raw extension. It returns false if the extension holds an object that is not encoded
// yet.
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

// appendLength appends the length of a list or map, or that it is nil.
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
		if v.Len() > maxShapeBytes { // each key takes at least a byte
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

// walkInterface appends the shape of a value that JSON decodes to. It returns false for other types.
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
