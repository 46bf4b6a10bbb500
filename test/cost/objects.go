package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

// large is a large object of a built-in kind.
type large struct {
	name, collection string
	as               sender
	make             func() object
}

const rbac = "/apis/rbac.authorization.k8s.io/v1/namespaces/" + namespace

func meta(apiVersion, kind string, more object) object {
	o := object{"apiVersion": apiVersion, "kind": kind, "metadata": metadata("large")}
	for k, v := range more {
		o[k] = v
	}
	return o
}

// objects returns a shape for each kind that creates, reads, lists and updates a large object.
func objects() []*shape {
	var all []*shape
	for _, l := range largeObjects() {
		all = append(all, &shape{name: l.name, run: func(ctx context.Context, a *attempt) {
			o := l.make()
			path := l.collection + "/large"
			a.remove(path)
			code, _ := a.create(ctx, l.as, l.collection, o)
			if code != http.StatusCreated {
				return
			}
			for range 3 {
				a.get(ctx, l.as, path)
				a.get(ctx, l.as, l.collection)
				a.write(ctx, l.as, http.MethodPatch, path, mergeMedia, []byte(`{"metadata":{"labels":{"a":"b"}}}`))
			}
		}})
	}
	return append(all, &shape{
		name: "a Role of 9,000 rules, and 100 requests of its subject",
		setup: func(a *attempt) error {
			rules := many(9000, func(i int) object {
				return object{
					"apiGroups": []string{""},
					"resources": []string{fmt.Sprintf("r%d", i)},
					"verbs":     []string{"get"},
				}
			})
			role := meta("rbac.authorization.k8s.io/v1", "Role", object{"rules": rules})
			if err := a.prepare(rbac+"/roles", role); err != nil {
				return err
			}
			return a.prepare(rbac+"/rolebindings", meta("rbac.authorization.k8s.io/v1", "RoleBinding", object{
				"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "large"},
				"subjects": []object{{"kind": "ServiceAccount", "name": "tenant", "namespace": namespace}},
			}))
		},
		run: func(ctx context.Context, a *attempt) {
			times(ctx, 100, 4, func(i int) { a.get(ctx, tenant, fmt.Sprintf("/api/v1/nodes/n%d", i)) })
		},
	})
}

func largeObjects() []large {
	text := strings.Repeat("x", 1_000_000)
	const core = "/api/v1/namespaces/" + namespace
	return []large{
		{"ConfigMap of 1 MB", configMaps, tenant, func() object {
			return configMap("large", object{"a": text})
		}},
		{"ConfigMap of 80,000 keys", configMaps, tenant, func() object {
			return configMap("large", keys(80_000, ""))
		}},
		{"Secret of 1 MB", core + "/secrets", tenant, func() object {
			return meta("v1", "Secret", object{"stringData": object{"a": text}})
		}},
		{"Pod of 25,000 variables", pods, tenant, func() object {
			return meta(
				"v1",
				"Pod",
				object{"spec": object{"automountServiceAccountToken": false, "containers": []object{
					{"name": "c", "image": "i", "env": many(25_000, func(i int) object {
						return object{"name": fmt.Sprintf("E%d", i), "value": "0123456789"}
					})}}}},
			)
		}},
		{"Pod of 2,000 containers and volumes", pods, tenant, func() object {
			mounts := many(
				50,
				func(i int) object { return object{"name": fmt.Sprintf("v%d", i), "mountPath": fmt.Sprintf("/%d", i)} },
			)
			return meta("v1", "Pod", object{"spec": object{"automountServiceAccountToken": false,
				"volumes": many(2000, func(i int) object {
					return object{"name": fmt.Sprintf("v%d", i), "emptyDir": object{}}
				}),
				"containers": many(500, func(i int) object {
					return object{"name": fmt.Sprintf("c%d", i), "image": "i", "volumeMounts": mounts}
				})}})
		}},
		{"Node of 10,000 taints", "/api/v1/nodes", admin, func() object {
			return meta("v1", "Node", object{"spec": object{"taints": many(10_000, func(i int) object {
				return object{"key": fmt.Sprintf("k%d", i), "effect": "NoSchedule"}
			})}})
		}},
		{
			"EndpointSlice of 1,000 endpoints",
			"/apis/discovery.k8s.io/v1/namespaces/" + namespace + "/endpointslices",
			tenant,
			func() object {
				return meta("discovery.k8s.io/v1", "EndpointSlice", object{"addressType": "IPv4",
					"endpoints": many(1000, func(i int) object {
						return object{"addresses": many(100, func(j int) string {
							return fmt.Sprintf("10.%d.%d.%d", i/250, i%250, j+1)
						}), "conditions": object{"ready": true}}
					}),
					"ports": many(
						100,
						func(i int) object { return object{"name": fmt.Sprintf("p%d", i), "port": i + 1} },
					)})
			},
		},
		{"Ingress of 10,000 paths", "/apis/networking.k8s.io/v1/namespaces/" + namespace + "/ingresses", tenant,
			func() object {
				return meta(
					"networking.k8s.io/v1",
					"Ingress",
					object{"spec": object{"rules": many(100, func(i int) object {
						return object{
							"host": fmt.Sprintf("h%d.example.com", i),
							"http": object{"paths": many(100, func(j int) object {
								return object{"path": fmt.Sprintf("/%d", j), "pathType": "Prefix", "backend": object{
									"service": object{"name": "s", "port": object{"number": 80}}}}
							})},
						}
					})}},
				)
			}},
		{"250 kB of annotations and 5,000 labels", configMaps, tenant, func() object {
			o := configMap("large", nil)
			o["metadata"].(object)["labels"] = keys(5000, "x")
			o["metadata"].(object)["annotations"] = object{"a": strings.Repeat("x", 250_000)}
			return o
		}},
	}
}
