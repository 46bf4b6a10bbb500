package conversion

import (
	"reflect"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// timestamp is a time in an object.
type timestamp struct {
	value time.Time
	set   func(time.Time)
}

// timestampsOf returns an object's times that are not zero. In a custom resource, times are strings in RFC 3339. The
// result is incomplete if there are more than maxTimestamps.
func timestampsOf(obj runtime.Object) []timestamp {
	all := []timestamp{}
	if u, ok := obj.(runtime.Unstructured); ok {
		appendTimestamps(u.UnstructuredContent(), &all)
		return all
	}
	add := func(ts time.Time, set func(time.Time)) {
		if !ts.IsZero() {
			all = append(all, timestamp{ts, set})
		}
	}
	walk(reflect.ValueOf(obj), func(v reflect.Value) bool {
		switch ts := v.Addr().Interface().(type) {
		case *metav1.Time:
			add(ts.Time, func(t time.Time) { ts.Time = t })
		case *metav1.MicroTime:
			add(ts.Time, func(t time.Time) { ts.Time = t })
		default:
			return len(all) <= maxTimestamps
		}
		return false
	})
	return all
}

// walk visits every settable struct in v. It visits the contents of a struct if visit returns true. It skips maps and
// interfaces, because API types contain no times there.
func walk(v reflect.Value, visit func(reflect.Value) bool) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			walk(v.Elem(), visit)
		}
	case reflect.Struct:
		if !v.CanAddr() || !visit(v) {
			return
		}
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				walk(v.Field(i), visit)
			}
		}
	case reflect.Slice:
		if mayHoldStructs(v.Type().Elem()) {
			for i := range v.Len() {
				walk(v.Index(i), visit)
			}
		}
	}
}

func mayHoldStructs(t reflect.Type) bool {
	return t.Kind() == reflect.Struct || t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice
}

// appendTimestamps appends the strings in a JSON value that are times.
func appendTimestamps(value any, all *[]timestamp) {
	each := func(child any, set func(any)) {
		text, ok := child.(string)
		if !ok {
			appendTimestamps(child, all)
			return
		}
		if len(text) < len("2006-01-02T3:04:05Z") || text[4] != '-' {
			return
		}
		ts, err := time.Parse(time.RFC3339, text)
		if err != nil {
			return
		}
		*all = append(*all, timestamp{ts, func(t time.Time) {
			if t.Equal(ts) {
				set(text)
			} else {
				set(t.Format(time.RFC3339Nano))
			}
		}})
	}
	switch v := value.(type) {
	case map[string]any:
		for k, child := range v {
			if len(*all) > maxTimestamps {
				return
			}
			each(child, func(replacement any) { v[k] = replacement })
		}
	case []any:
		for i, child := range v {
			if len(*all) > maxTimestamps {
				return
			}
			each(child, func(replacement any) { v[i] = replacement })
		}
	}
}
