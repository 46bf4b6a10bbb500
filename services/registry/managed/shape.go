package managed

import (
	"encoding/binary"
	"encoding/json"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"sync"
	"unsafe"

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
// The managedFields themselves are no part of a shape.
//
// A shape with too much in it differs for objects with equal fields, which costs time. A shape with too little in it
// would give an object the fields of another object.
type shape struct {
	bytes []byte
	// omitted has the strings of which bytes has only that they are not empty, if record is set. Objects of equal shape
	// have the same field at an index of omitted.
	omitted []string
	record  bool
	// metadata: the walk has reached the object's metadata, which precedes the metadata of templates.
	metadata bool
}

// add appends an object's shape. It returns false if the shape is too long, or if only the JSON of some part has that
// part's fields.
func (s *shape) add(obj runtime.Object) bool {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		content := withoutManagedFields(u.Object)
		return walkerOf(reflect.TypeOf(content))(s, reflect.ValueOf(content), false)
	}
	v := reflect.ValueOf(obj)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return false
	}
	return walkerOf(v.Type().Elem())(s, v.Elem(), false)
}

// withoutManagedFields returns an object without its managedFields. It does not change the object.
func withoutManagedFields(object map[string]any) map[string]any {
	m, _ := object["metadata"].(map[string]any)
	if _, ok := m["managedFields"]; !ok {
		return object
	}
	m = maps.Clone(m)
	delete(m, "managedFields")
	object = maps.Clone(object)
	object["metadata"] = m
	return object
}

// walker appends a value's shape. element reports whether the value is a list's element, or part of an element.
type walker func(s *shape, v reflect.Value, element bool) bool

var walkers sync.Map // reflect.Type to walker

func walkerOf(t reflect.Type) walker {
	if w, ok := walkers.Load(t); ok {
		return w.(walker)
	}
	// a type may contain itself: other callers use this walker while newWalker runs
	var once sync.Once
	var made walker
	w, _ := walkers.LoadOrStore(t, walker(func(s *shape, v reflect.Value, element bool) bool {
		once.Do(func() { made = newWalker(t) })
		return made(s, v, element)
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
		return func(s *shape, v reflect.Value, _ bool) bool {
			s.bytes = binary.AppendVarint(s.bytes, v.Int())
			return true
		}
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return func(s *shape, v reflect.Value, _ bool) bool {
			s.bytes = binary.AppendUvarint(s.bytes, v.Uint())
			return true
		}
	case reflect.Float32, reflect.Float64:
		return func(s *shape, v reflect.Value, _ bool) bool {
			s.bytes = binary.BigEndian.AppendUint64(s.bytes, math.Float64bits(v.Float()))
			return true
		}
	case reflect.String:
		return func(s *shape, v reflect.Value, element bool) bool { return s.addText(v.String(), element) }
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

func unsupported(*shape, reflect.Value, bool) bool { return false }

// addByte appends a byte, and returns true.
func (s *shape) addByte(b byte) bool {
	s.bytes = append(s.bytes, b)
	return true
}

// addText appends text if whole is set, otherwise whether text is empty. It returns false if the shape is too long.
func (s *shape) addText(text string, whole bool) bool {
	switch {
	case len(text) == 0:
		return s.addByte(empty)
	case !whole:
		if s.record {
			s.omitted = append(s.omitted, text)
		}
		return s.addByte(present)
	case len(s.bytes)+len(text) > maxShapeBytes:
		return false
	}
	s.addByte(present)
	s.bytes = append(binary.AppendUvarint(s.bytes, uint64(len(text))), text...)
	return true
}

// viewOf returns bytes of the object as a string, without a copy. No caller changes the object during a walk, and shape
// does not outlive it.
func viewOf(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }

func walkBool(s *shape, v reflect.Value, _ bool) bool {
	if v.Bool() {
		return s.addByte(1)
	}
	return s.addByte(0)
}

// textWalker returns a walker that compares JSON, because JSON encodes a zero time of any zone as null.
func textWalker(t reflect.Type) walker {
	none, err := json.Marshal(reflect.Zero(t).Interface())
	if err != nil {
		return unsupported
	}
	return func(s *shape, v reflect.Value, element bool) bool {
		if !element && v.IsZero() {
			return s.addByte(empty)
		}
		data, err := json.Marshal(v.Interface())
		switch {
		case err != nil:
			return false
		case !element && string(data) == string(none):
			return s.addByte(empty)
		}
		return s.addText(string(data), element)
	}
}

// walkRaw appends the JSON of a raw extension. It returns false if the extension holds an object that is not encoded
// yet.
func walkRaw(s *shape, v reflect.Value, _ bool) bool {
	r, _ := v.Interface().(runtime.RawExtension)
	return r.Object == nil && s.addText(viewOf(r.Raw), true)
}

func pointerWalker(t reflect.Type) walker {
	elem := walkerOf(t.Elem())
	return func(s *shape, v reflect.Value, element bool) bool {
		if v.IsNil() {
			return s.addByte(absent)
		}
		return s.addByte(present) && elem(s, v.Elem(), element)
	}
}

func structWalker(t reflect.Type) walker {
	var fields []walker
	managedFields := -1
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() {
			return unsupported
		}
		if t == reflect.TypeFor[metav1.ObjectMeta]() && f.Name == "ManagedFields" {
			managedFields = i
		}
		fields = append(fields, walkerOf(f.Type))
	}
	return func(s *shape, v reflect.Value, element bool) bool {
		own := managedFields >= 0 && !s.metadata
		s.metadata = s.metadata || own
		for i, walk := range fields {
			if own && i == managedFields {
				continue
			}
			if !walk(s, v.Field(i), element) {
				return false
			}
		}
		return true
	}
}

// addLength appends the length of a list or map, or that it is nil.
func (s *shape) addLength(v reflect.Value) {
	if v.IsNil() {
		s.addByte(absent)
		return
	}
	s.addByte(present)
	s.bytes = binary.AppendUvarint(s.bytes, uint64(v.Len()))
}

func sliceWalker(t reflect.Type) walker {
	if t.Elem().Kind() == reflect.Uint8 {
		return func(s *shape, v reflect.Value, element bool) bool {
			if v.IsNil() {
				return s.addByte(absent)
			}
			return s.addText(viewOf(v.Bytes()), element)
		}
	}
	elem := walkerOf(t.Elem())
	return func(s *shape, v reflect.Value, _ bool) bool {
		s.addLength(v)
		for i := range v.Len() {
			if len(s.bytes) > maxShapeBytes || !elem(s, v.Index(i), true) {
				return false
			}
		}
		return true
	}
}

func mapWalker(t reflect.Type) walker {
	if t.Key().Kind() != reflect.String {
		return unsupported
	}
	elem := walkerOf(t.Elem())
	return func(s *shape, v reflect.Value, element bool) bool {
		s.addLength(v)
		if v.Len() > maxShapeBytes { // each key takes at least a byte
			return false
		}
		keys := v.MapKeys()
		slices.SortFunc(keys, func(a, b reflect.Value) int { return strings.Compare(a.String(), b.String()) })
		for _, k := range keys {
			// a custom resource's element is a map, whose values may be keys
			if !s.addText(k.String(), true) ||
				!elem(s, v.MapIndex(k), element && t.Elem().Kind() == reflect.Interface) {
				return false
			}
		}
		return true
	}
}

// walkInterface appends the shape of a value that JSON decodes to. It returns false for other types.
func walkInterface(s *shape, v reflect.Value, element bool) bool {
	if v.IsNil() {
		return s.addByte(absent)
	}
	v = v.Elem()
	switch kind := v.Kind(); kind {
	case reflect.Bool, reflect.String, reflect.Int64, reflect.Float64:
		return s.addByte(byte(kind)) && walkerOf(v.Type())(s, v, element)
	case reflect.Slice, reflect.Map:
		return v.Type().Elem().Kind() == reflect.Interface &&
			s.addByte(byte(kind)) && walkerOf(v.Type())(s, v, element)
	}
	return false
}
