package cache

import (
	"maps"
	"testing"

	"k8s.io/apimachinery/pkg/fields"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Every object has the fields of its name, and an object with no other field keeps no map.
func TestFieldsOfAnItem(t *testing.T) {
	all := map[string]string{"metadata.name": "a", "metadata.namespace": "ns"}
	of := func(more map[string]string) *Item {
		selectable := maps.Clone(all)
		maps.Copy(selectable, more)
		return ItemOf(&registryv1.Row{Namespace: "ns", Name: "a", Fields: selectable})
	}
	plain, pod := of(nil), of(map[string]string{"spec.nodeName": "n"})
	if plain.fields != nil {
		t.Errorf("the item has %v", plain.fields)
	}
	for selector, want := range map[string][2]bool{
		"metadata.name=a":                          {true, true},
		"metadata.name=b":                          {false, false},
		"metadata.namespace=ns,metadata.name!=b":   {true, true},
		"metadata.namespace!=ns":                   {false, false},
		"spec.nodeName=n":                          {false, true},
		"spec.nodeName!=n":                         {true, false},
		"spec.nodeName=":                           {true, false},
		"metadata.name=a,spec.nodeName=n,other=":   {false, true},
		"metadata.name=a,spec.nodeName!=,other!=x": {false, true},
	} {
		s, err := fields.ParseSelector(selector)
		if err != nil {
			t.Fatal(err)
		}
		if got := [2]bool{s.Matches(plain.Fields()), s.Matches(pod.Fields())}; got != want {
			t.Errorf("%s selects %v, not %v", selector, got, want)
		}
	}
	if plain.Field("metadata.name") != "a" || pod.Field("spec.nodeName") != "n" ||
		!plain.Fields().Has("metadata.namespace") {
		t.Error("a field is missing")
	}
}
