package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

// applying sends n server-side applies of an object.
func applying(ctx context.Context, a *attempt, path, manager string, n int, o object) {
	body := marshal(o)
	for range n {
		a.write(ctx, tenant, http.MethodPatch, path+"?fieldManager="+manager, applyMedia, body)
	}
}

// owners returns the managedFields of n managers, of which each owns a key.
func owners(n int) []object {
	return many(n, func(i int) object {
		return object{
			"manager": fmt.Sprintf("manager-%d", i), "operation": "Apply", "apiVersion": "v1",
			"time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1",
			"fieldsV1": object{"f:data": object{fmt.Sprintf("f:k%d", i): object{}}},
		}
	})
}

func applies() []*shape {
	ownedBy := func(n int) func(a *attempt) error {
		return func(a *attempt) error {
			o := configMap("owned", keys(n, "x"))
			o["metadata"].(object)["managedFields"] = owners(n)
			return a.prepare(configMaps, o)
		}
	}
	return []*shape{
		{
			name:  "10 applies beside 1,000 managers",
			setup: ownedBy(1000),
			run: func(ctx context.Context, a *attempt) {
				applying(ctx, a, configMaps+"/owned", "mine", 10, configMap("owned", object{"own": "x"}))
			},
		},
		{
			name:  "50 conflicts with 1,000 managers each",
			setup: ownedBy(1000),
			run: func(ctx context.Context, a *attempt) {
				applying(ctx, a, configMaps+"/owned", "mine", 50, configMap("owned", keys(1000, "y")))
			},
		},
		{
			name: "10,000 keys, twice",
			run: func(ctx context.Context, a *attempt) {
				a.remove(configMaps + "/applied")
				applying(ctx, a, configMaps+"/applied", "mine", 2, configMap("applied", keys(10_000, "x")))
			},
		},
		{
			name:  "5,000 list items, twice",
			about: "each is a field of its own",
			run: func(ctx context.Context, a *attempt) {
				a.remove(deployments + "/patched")
				applying(ctx, a, deployments+"/patched", "mine", 2, podTemplate(5000, "E"))
			},
		},
		{
			name: "10,000 items of one name",
			run: func(ctx context.Context, a *attempt) {
				o := podTemplate(1, "E")
				c := o["spec"].(object)["template"].(object)["spec"].(object)["containers"].([]object)[0]
				c["env"] = many(10_000, func(int) object { return object{"name": "E", "value": "v"} })
				applying(ctx, a, deployments+"/patched", "mine", 1, o)
			},
		},
		{
			name: "9,000 levels",
			run: func(ctx context.Context, a *attempt) {
				body := `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"applied"},"data":` +
					nested(9000, `{"a":`, `"x"`, `}`) + `}`
				a.write(ctx, tenant, http.MethodPatch, configMaps+"/applied?fieldManager=m", applyMedia, []byte(body))
			},
		},
		{
			name:  "YAML aliases that double",
			about: "20 levels of nine",
			run: func(ctx context.Context, a *attempt) {
				a.write(
					ctx,
					tenant,
					http.MethodPatch,
					configMaps+"/applied?fieldManager=m",
					applyMedia,
					[]byte(laughs(20)),
				)
			},
		},
		{
			name:  "managedFields of 1 MB",
			about: "an object is created with them, and applied twice",
			setup: func(a *attempt) error { return a.prepare(configMaps, configMap("owned", nil)) },
			run: func(ctx context.Context, a *attempt) {
				o := configMap("fields", object{"a": "x"})
				fields := keys(1, object{})
				for i := range 30_000 {
					fields[fmt.Sprintf("f:%s%d", strings.Repeat("k", 20), i)] = object{}
				}
				o["metadata"].(object)["managedFields"] = []object{
					{"manager": "m", "operation": "Apply", "apiVersion": "v1",
						"time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": object{"f:data": fields}},
				}
				a.remove(configMaps + "/fields")
				a.create(ctx, tenant, configMaps, o)
				applying(ctx, a, configMaps+"/fields", "m2", 2, configMap("fields", object{"b": "x"}))
			},
		},
	}
}
