package crd

import (
	"math"
	"reflect"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// Numbers keep their Go types in JSON.
func TestNumbersKeepTheirTypes(t *testing.T) {
	u := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "g/v1", "kind": "Thing",
		"a": 5.0, "b": int64(5), "items": []any{},
		"c": []any{1.5, -3.0, map[string]any{"d": 1e20, "e": 1e22, "f": math.Copysign(0, -1)}},
	}}
	before := u.DeepCopy()
	data, err := MarshalJSON(u)
	if err != nil {
		t.Fatal(err)
	}
	got := &unstructured.Unstructured{}
	if err := got.UnmarshalJSON(data); err != nil || !reflect.DeepEqual(got, before) || !reflect.DeepEqual(u, before) {
		t.Errorf("%s: %v, %v", data, got, err)
	}
	delete(u.Object, "a")
	delete(u.Object, "c")
	want, _ := u.MarshalJSON()
	if data, err := MarshalJSON(u); err != nil || string(data) != string(want) {
		t.Errorf("%s, not %s: %v", data, want, err)
	}
}
