package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

// operations returns a JSON Patch of n operations.
func operations(n int, f func(i int) object) []byte { return marshal(many(n, f)) }

// patch returns a shape that sends one patch of the tenant's ConfigMap. Its setup creates the ConfigMap with data.
func patch(name, about, media string, data object, body func() []byte) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error { return a.prepare(configMaps, configMap("patched", data)) },
		run: func(ctx context.Context, a *attempt) {
			a.write(ctx, tenant, http.MethodPatch, configMaps+"/patched", media, body())
		},
	}
}

func copies(i int) object {
	return object{"op": "copy", "from": "/data", "path": fmt.Sprintf("/data/x%d", i)}
}

func jsonPatches() []*shape {
	small := object{"a": "x"}
	with := func(name, about string, data object, n int, f func(i int) object) *shape {
		return patch(name, about, jsonPatchMedia, data, func() []byte { return operations(n, f) })
	}
	deep := strings.Repeat("/a", 5000)
	return []*shape{
		with("22 copies that double", "1.2 kB", small, 22, copies),
		with("24 copies that double", "1.3 kB", small, 24, copies),
		with("9,000 copies of a value", "", object{"a": strings.Repeat("x", 1000)}, 9000, func(i int) object {
			return object{"op": "copy", "from": "/data/a", "path": fmt.Sprintf("/data/x%d", i)}
		}),
		with("9,000 moves", "", small, 9000, func(i int) object {
			return object{
				"op":   "move",
				"from": fmt.Sprintf("/data/%c", "ab"[i%2]),
				"path": fmt.Sprintf("/data/%c", "ba"[i%2]),
			}
		}),
		with(
			"9,000 tests of a document of 900 kB",
			"each compares all data",
			object{"a": strings.Repeat("x", 900_000)},
			9000,
			func(int) object { return object{"op": "test", "path": "/data/b", "value": nil} },
		),
		with("200 tests of paths 5,000 levels deep", "", small, 200, func(int) object {
			return object{"op": "test", "path": "/data" + deep, "value": "x"}
		}),
		with("10,000 additions", "the most operations that are allowed", small, 10_000, func(i int) object {
			return object{"op": "add", "path": fmt.Sprintf("/data/k%d", i), "value": "x"}
		}),
		with("10,001 additions", "", small, 10_001, func(i int) object {
			return object{"op": "add", "path": fmt.Sprintf("/data/k%d", i), "value": "x"}
		}),
		with("9,000 insertions at the front of an array", "", small, 9001, func(i int) object {
			if i == 0 {
				return object{"op": "add", "path": "/metadata/finalizers", "value": []string{}}
			}
			return object{"op": "add", "path": "/metadata/finalizers/0", "value": "example.com/f"}
		}),
		with("an addition at index 2,000,000,000", "", small, 2, func(i int) object {
			if i == 0 {
				return object{"op": "add", "path": "/metadata/finalizers", "value": []string{}}
			}
			return object{"op": "add", "path": "/metadata/finalizers/2000000000", "value": "example.com/f"}
		}),
	}
}

// podTemplate returns a Deployment with n environment variables, which strategic merge patches match by name.
func podTemplate(n int, prefix string) object {
	env := many(n, func(i int) object { return object{"name": fmt.Sprintf("%s%d", prefix, i), "value": "v"} })
	return object{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata("patched"), "spec": object{
		"replicas": 0,
		"selector": object{"matchLabels": object{"a": "b"}},
		"template": object{
			"metadata": object{"labels": object{"a": "b"}},
			"spec":     object{"containers": []object{{"name": "c", "image": "i", "env": env}}},
		}}}
}

const deployments = "/apis/apps/v1/namespaces/" + namespace + "/deployments"

// strategic returns a shape that sends one strategic merge patch of a container in a Deployment with n environment
// variables.
func strategic(name, about string, n int, container func() object) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error { return a.prepare(deployments, podTemplate(n, "E")) },
		run: func(ctx context.Context, a *attempt) {
			a.write(
				ctx,
				tenant,
				http.MethodPatch,
				deployments+"/patched",
				strategicMedia,
				marshal(object{"spec": object{
					"template": object{"spec": object{"containers": []object{container()}}}}}),
			)
		},
	}
}

func mergePatches() []*shape {
	small := object{"a": "x"}
	return []*shape{
		patch("100,000 keys", "more than a ConfigMap may hold", mergeMedia, small, func() []byte {
			return marshal(object{"data": keys(100_000, "0123456789")})
		}),
		patch("5,000 levels", "", mergeMedia, small, func() []byte {
			return []byte(`{"data":` + nested(5000, `{"a":`, `"x"`, `}`) + `}`)
		}),
		strategic("strategic: 5,000 items beside 5,000", "merged by name", 5000, func() object {
			return object{"name": "c", "env": many(5000, func(i int) object {
				return object{"name": fmt.Sprintf("F%d", i), "value": "v"}
			})}
		}),
		strategic("strategic: 5,000 items deleted of 5,000", "", 5000, func() object {
			return object{"name": "c", "env": many(5000, func(i int) object {
				return object{"name": fmt.Sprintf("E%d", i), "$patch": "delete"}
			})}
		}),
		strategic("strategic: an order of 10,000 items", "$setElementOrder", 1000, func() object {
			return object{"name": "c", "$setElementOrder/env": many(10_000, func(i int) object {
				return object{"name": fmt.Sprintf("E%d", 9999-i)}
			}), "env": []object{{"name": "E1", "value": "w"}}}
		}),
		patch("strategic: directives 5,000 levels deep", "", strategicMedia, small, func() []byte {
			return []byte(`{"metadata":` + nested(5000, `{"$patch":"merge","a":`, `"x"`, `}`) + `}`)
		}),
	}
}
