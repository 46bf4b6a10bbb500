package main

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// fuzz changes valid objects at random, and compares both servers' validation.
func (p *pair) fuzz(all []*object, rounds int, rng *rand.Rand) {
	for range rounds {
		for _, o := range all {
			body := clone(o.body)
			mutation := mutate(body, rng)
			if m, ok := body["metadata"].(map[string]any); ok && m["name"] == o.name && o.name != "" {
				m["name"] = o.name + "-fuzz"
			}
			if o.name != "" && rng.IntN(4) == 0 { // an update of the existing object
				body["metadata"] = map[string]any{"name": o.name, "resourceVersion": versionOf(o.path())}
				p.ask(&request{
					method: "PUT",
					path:   o.path() + "?dryRun=All",
					header: jsonBody,
					body:   must(json.Marshal(body)),
					about:  "fuzzed update: " + mutation,
				})
				continue
			}
			query := []string{"?dryRun=All", "?dryRun=All&fieldValidation=Strict",
				"?dryRun=All&fieldValidation=Ignore"}[rng.IntN(3)]
			p.ask(&request{
				method: "POST",
				path:   o.collection + query,
				header: jsonBody,
				body:   must(json.Marshal(body)),
				about:  "fuzzed create: " + mutation,
			})
		}
	}
}

// odd returns a value that does not fit its field.
func odd(rng *rand.Rand) any {
	all := []any{nil, "", "x", "UPPER", "-bad-", strings.Repeat("long", 80), 0, -1, 1 << 40, 1.5, true, []any{},
		map[string]any{}, []any{nil}, map[string]any{"a": "b"}, []any{map[string]any{}}, "10Gi", "80%",
		"2026-01-01T00:00:00Z", "a.b/c", "{{", "$(X)", "é"}
	return all[rng.IntN(len(all))]
}

// mutate changes up to two places of v, and returns a description of the changes.
func mutate(v map[string]any, rng *rand.Rand) string {
	var did []string
	for range 1 + rng.IntN(2) {
		node, path := any(v), ""
		for {
			switch x := node.(type) {
			case map[string]any:
				keys := make([]string, 0, len(x))
				for k := range x {
					if path != "" || k != "apiVersion" && k != "kind" {
						keys = append(keys, k)
					}
				}
				slices.Sort(keys)
				if len(keys) == 0 || rng.IntN(8) == 0 {
					k := []string{"added", "name", "spec", "status", "labels", "type", "selector"}[rng.IntN(7)]
					x[k] = odd(rng)
					did = append(did, path+"."+k+" added")
					node = nil
					break
				}
				k := keys[rng.IntN(len(keys))]
				inner := x[k]
				_, isMap := inner.(map[string]any)
				_, isList := inner.([]any)
				if (isMap || isList) && rng.IntN(5) > 0 {
					node, path = inner, path+"."+k
					continue
				}
				if rng.IntN(4) == 0 {
					delete(x, k)
					did = append(did, path+"."+k+" removed")
				} else {
					x[k] = odd(rng)
					did = append(did, path+"."+k+" replaced")
				}
				node = nil
			case []any:
				if len(x) == 0 {
					node = nil
					break
				}
				i := rng.IntN(len(x))
				if m, ok := x[i].(map[string]any); ok {
					node, path = m, fmt.Sprintf("%s[%d]", path, i)
					continue
				}
				x[i] = odd(rng)
				did = append(did, fmt.Sprintf("%s[%d] replaced", path, i))
				node = nil
			default:
				node = nil
			}
			if node == nil {
				break
			}
		}
	}
	return strings.Join(did, ", ")
}
