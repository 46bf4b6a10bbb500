package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// fixtures sends the bodies of Kubernetes' own round-trip tests, which set every field of every type.
func (p *pair) fixtures(d *discovered, dir string) {
	for gvk, r := range sortedKinds(d) {
		group := gvk.Group
		if group == "" {
			group = "core"
		}
		base := filepath.Join(dir, fmt.Sprintf("%s.%s.%s", group, gvk.Version, gvk.Kind))
		collection := root(gvk.GroupVersion())
		if r.Namespaced {
			collection += "/namespaces/" + namespace
		}
		collection += "/" + r.Name
		for _, form := range [][2]string{{"json", "application/json"}, {"yaml", "application/yaml"},
			{"pb", "application/vnd.kubernetes.protobuf"}} {
			ext, contentType := form[0], form[1]
			data, err := os.ReadFile(base + "." + ext)
			if err != nil {
				continue
			}
			if slices.Contains(r.Verbs, "create") {
				p.ask(&request{
					method: "POST",
					path:   collection + "?dryRun=All",
					header: map[string]string{"Content-Type": contentType},
					body:   data,
					about:  "fixture as it is",
				})
			}
			if slices.Contains(r.Verbs, "update") {
				p.ask(&request{
					method: "PUT",
					path:   collection + "/nameValue?dryRun=All",
					header: map[string]string{"Content-Type": contentType},
					body:   data,
					about:  "update by fixture",
				})
			}
			if ext != "json" {
				continue
			}
			body := map[string]any{}
			if json.Unmarshal(data, &body) != nil {
				continue
			}
			m, ok := body["metadata"].(map[string]any)
			if !ok {
				continue
			}
			for k := range m {
				if k != "name" && k != "namespace" {
					delete(m, k)
				}
			}
			m["name"] = "fixture"
			if r.Namespaced {
				m["namespace"] = namespace
			} else {
				delete(m, "namespace")
			}
			p.ask(&request{
				method: "POST",
				path:   collection + "?dryRun=All",
				header: jsonBody,
				body:   must(json.Marshal(body)),
				about:  "fixture with a name",
			})
			for _, k := range slices.Sorted(maps.Keys(body)) { // a separate request for each part finds more
				if k == "apiVersion" || k == "kind" || k == "metadata" {
					continue
				}
				variant := map[string]any{"apiVersion": body["apiVersion"], "kind": body["kind"],
					"metadata": m, k: body[k]}
				p.ask(&request{
					method: "POST",
					path:   collection + "?dryRun=All",
					header: jsonBody,
					body:   must(json.Marshal(variant)),
					about:  "fixture with " + k,
				})
			}
		}
	}
}

func sortedKinds(d *discovered) func(func(schema.GroupVersionKind, metav1.APIResource) bool) {
	var all []schema.GroupVersionKind
	for k := range d.kinds {
		all = append(all, k)
	}
	slices.SortFunc(all, func(a, b schema.GroupVersionKind) int { return strings.Compare(a.String(), b.String()) })
	return func(yield func(schema.GroupVersionKind, metav1.APIResource) bool) {
		for _, k := range all {
			if !yield(k, d.kinds[k]) {
				return
			}
		}
	}
}
