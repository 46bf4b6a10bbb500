package storage

import (
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// The defaults of a definition may share a string among many items of a small object.
func TestUnstructuredJSONIsBounded(t *testing.T) {
	items := make([]any, 100_000)
	for n := range items {
		items[n] = map[string]any{"p": strings.Repeat("x", 1000)}
	}
	object := func(items []any) *unstructured.Unstructured {
		return &unstructured.Unstructured{Object: map[string]any{
			"metadata": map[string]any{"name": "a"}, "spec": map[string]any{"l": items}}}
	}
	escaped := []any{strings.Repeat("<", 5<<20)}
	for _, large := range [][]any{items, escaped} {
		data, err := UnstructuredJSON(object(large))
		if err == nil || !strings.Contains(err.Error(), "exceeds 28 MB") {
			t.Errorf("%d bytes, %v", len(data), err)
		}
	}
	data, err := UnstructuredJSON(object(items[:20_000]))
	if err != nil {
		t.Fatal(err)
	}
	least := leastJSONBytes(object(items[:20_000]).Object, maxJSONBytes)
	if least > len(data)+2 || least < len(data)/2 {
		t.Errorf("the JSON has %d bytes, and at least %d", len(data), least)
	}
}
