package crd

import (
	"encoding/json"
	"math"
	"strconv"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// MarshalJSON returns a custom resource in JSON. A decoder finds the same Go types in it: upstream's encoder writes the
// float64 5 as "5", which a decoder reads as an int64, and CEL does not add to a double.
func MarshalJSON(u *unstructured.Unstructured) ([]byte, error) {
	if hasWholeFloat(u.Object) {
		u = &unstructured.Unstructured{Object: withNumbers(u.Object).(map[string]any)}
	}
	return u.MarshalJSON()
}

// isWholeFloat reports whether encoding/json writes v without a fraction and without an exponent.
func isWholeFloat(v any) bool {
	f, ok := v.(float64)
	return ok && f == math.Trunc(f) && math.Abs(f) < 1e21
}

func hasWholeFloat(v any) bool {
	switch v := v.(type) {
	case map[string]any:
		for _, e := range v {
			if hasWholeFloat(e) {
				return true
			}
		}
	case []any:
		for _, e := range v {
			if hasWholeFloat(e) {
				return true
			}
		}
	}
	return isWholeFloat(v)
}

// withNumbers returns a copy of v with a fraction in all whole floats.
func withNumbers(v any) any {
	switch v := v.(type) {
	case map[string]any:
		out := make(map[string]any, len(v))
		for k, e := range v {
			out[k] = withNumbers(e)
		}
		return out
	case []any:
		out := make([]any, len(v))
		for i, e := range v {
			out[i] = withNumbers(e)
		}
		return out
	}
	if isWholeFloat(v) {
		return json.Number(strconv.FormatFloat(v.(float64), 'f', 1, 64))
	}
	return v
}
