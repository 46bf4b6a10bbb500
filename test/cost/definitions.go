package main

import (
	"context"
	"fmt"
	"net/http"
	"strings"
)

const (
	crds    = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
	widgets = "/apis/cost.example.com/v1/namespaces/" + namespace + "/widgets"
)

// version returns a version of the widgets CRD.
func version(name string, storage bool, spec object, more object) object {
	v := object{"name": name, "served": true, "storage": storage, "schema": object{"openAPIV3Schema": object{
		"type": "object", "properties": object{"spec": spec}}}}
	for k, e := range more {
		v[k] = e
	}
	return v
}

// definition returns the widgets CRD.
func definition(conversion object, versions ...object) object {
	spec := object{"group": "cost.example.com", "scope": "Namespaced", "versions": versions,
		"names": object{"plural": "widgets", "singular": "widget", "kind": "Widget", "listKind": "WidgetList"}}
	if conversion != nil {
		spec["conversion"] = conversion
	}
	return object{"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": metadata("widgets.cost.example.com"), "spec": spec}
}

// define creates a CRD and waits until it is served.
func define(a *attempt, d object) error {
	if err := a.prepare(crds, d); err != nil {
		return err
	}
	return a.until(widgets, `"WidgetList"`)
}

func widget(version, name string, spec any) object {
	return object{
		"apiVersion": "cost.example.com/" + version,
		"kind":       "Widget",
		"metadata":   metadata(name),
		"spec":       spec,
	}
}

// anything returns a schema that preserves all fields.
func anything() object { return object{"type": "object", "x-kubernetes-preserve-unknown-fields": true} }

// custom returns a shape that defines widgets, then creates, reads, patches and lists n widgets.
func custom(name, about string, n int, schema func() object, spec func(i int) any) *shape {
	return &shape{
		name:  name,
		about: about,
		setup: func(a *attempt) error { return define(a, definition(nil, version("v1", true, schema(), nil))) },
		run: func(ctx context.Context, a *attempt) {
			times(ctx, n, 4, func(i int) {
				path := fmt.Sprintf("%s/w%d", widgets, i)
				o := widget("v1", fmt.Sprintf("w%d", i), spec(i))
				if code, _ := a.create(ctx, tenant, widgets, o); code == http.StatusCreated {
					a.get(ctx, tenant, path)
					a.write(
						ctx,
						tenant,
						http.MethodPatch,
						path,
						mergeMedia,
						[]byte(`{"metadata":{"labels":{"a":"b"}}}`),
					)
				}
			})
			a.get(ctx, tenant, widgets)
		},
	}
}

// largeSchema returns a schema of n properties, each with a pattern and a description.
func largeSchema(n int) object {
	properties := object{}
	for i := range n {
		properties[fmt.Sprintf("property%d", i)] = object{"type": "string", "maxLength": 100, "pattern": "^[a-z]*$",
			"description": strings.Repeat("d", 50)}
	}
	return object{"type": "object", "properties": properties}
}

// deepSchema returns a schema with depth levels.
func deepSchema(depth int) object {
	s := object{"type": "string"}
	for range depth {
		s = object{"type": "object", "properties": object{"a": s}}
	}
	return s
}

func definitions() []*shape {
	defining := func(name, about string, definition func() object) *shape {
		return &shape{name: name, about: about, run: func(ctx context.Context, a *attempt) {
			a.remove(crds + "/widgets.cost.example.com")
			if code, _ := a.create(ctx, admin, crds, definition()); code == http.StatusCreated {
				_ = a.until(widgets, `"WidgetList"`)
			}
		}}
	}
	rules := func(n int, rule string) []object {
		return many(n, func(i int) object { return object{"rule": fmt.Sprintf(rule, i)} })
	}
	return []*shape{
		defining("a schema of 8,000 properties", "1 MB", func() object {
			return definition(nil, version("v1", true, largeSchema(8000), nil))
		}),
		defining("50 versions of 150 properties", "", func() object {
			return definition(nil, many(50, func(i int) object {
				return version(fmt.Sprintf("v%d", i+1), i == 0, largeSchema(150), nil)
			})...)
		}),
		defining("a schema of 1,000 levels", "", func() object {
			return definition(nil, version("v1", true, deepSchema(1000), nil))
		}),
		defining("a CEL rule of 100 kB", "", func() object {
			return definition(nil, version("v1", true, object{"type": "object", "properties": object{
				"a": object{"type": "string", "maxLength": 10}}, "x-kubernetes-validations": []object{
				{"rule": strings.TrimSuffix(strings.Repeat("self.a != 'x' && ", 6000), "&& ")}}}, nil))
		}),
		defining("CEL rules beyond the estimate", "", func() object {
			list := object{"type": "array", "items": object{"type": "string"}}
			return definition(
				nil,
				version(
					"v1",
					true,
					object{"type": "object", "properties": object{"a": list}, "x-kubernetes-validations": rules(
						10, "self.a.all(x, self.a.all(y, self.a.all(z, x != y && y != z && z != '%d')))")},
					nil,
				),
			)
		}),
		custom("objects of a large schema", "2,000 properties, 3 objects with half of them", 3, func() object {
			return largeSchema(2000)
		}, func(int) any {
			o := object{}
			for i := range 1000 {
				o[fmt.Sprintf("property%d", i)] = "abc"
			}
			return o
		}),
		custom("objects near the budget of CEL", "20 lists of 100 strings, each against each", 20, func() object {
			return object{"type": "object", "properties": object{"a": object{"type": "array", "maxItems": 100,
				"items": object{"type": "string", "maxLength": 20}}}, "x-kubernetes-validations": rules(10,
				"self.a.all(x, self.a.exists(y, x == y && x != 'no%d'))")}
		}, func(i int) any {
			return object{"a": many(100, func(j int) string { return fmt.Sprintf("i%d-%d", i, j) })}
		}),
		custom(
			"defaults that grow a hundredfold",
			"2 lists of 2,000 empty objects, each defaulted to 50 keys",
			2,
			func() object {
				item := object{}
				for i := range 50 {
					item[fmt.Sprintf("k%d", i)] = object{"type": "string", "default": strings.Repeat("d", 200)}
				}
				return object{"type": "object", "properties": object{"a": object{"type": "array",
					"items": object{"type": "object", "properties": item}}}}
			},
			func(int) any { return object{"a": many(2000, func(int) object { return object{} })} },
		),
		custom("1.4 MB that the schema prunes", "10 objects of 100,000 unknown keys", 10, func() object {
			return largeSchema(10)
		}, func(int) any { return keys(100_000, "x") }),
		custom("objects of 9,000 levels", "3 objects without a schema", 3, anything, func(int) any {
			var v any = "x"
			for range 9000 {
				v = object{"a": v}
			}
			return v
		}),
		tables(),
		{
			name:  "a definition that changes 20 times",
			about: "with 2,000 properties",
			setup: func(a *attempt) error {
				return define(a, definition(nil, version("v1", true, largeSchema(2000), nil)))
			},
			run: func(ctx context.Context, a *attempt) {
				times(ctx, 20, 1, func(i int) {
					a.write(
						ctx,
						admin,
						http.MethodPatch,
						crds+"/widgets.cost.example.com",
						jsonPatchMedia,
						marshal([]object{{"op": "add",
							"path": fmt.Sprintf(
								"/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties/more%d",
								i,
							),
							"value": object{"type": "string"}}}),
					)
					a.get(ctx, tenant, widgets)
				})
			},
		},
	}
}

// tables returns a shape that lists objects as Tables, with columns that evaluate JSONPath.
func tables() *shape {
	return &shape{
		name:  "Tables with columns of a definition's JSONPath",
		about: "40 columns over 10 objects with lists of 1,000 items, 5 lists",
		setup: func(a *attempt) error {
			columns := many(40, func(i int) object {
				return object{
					"name": fmt.Sprintf("c%d", i),
					"type": "string",
					"jsonPath": []string{".spec.a[*].b", ".spec..b",
						".spec.a[?(@.b==\"x\")].c", ".spec.a[0:900].c"}[i%4],
				}
			})
			v := version("v1", true, anything(), object{"additionalPrinterColumns": columns})
			if err := define(a, definition(nil, v)); err != nil {
				return err
			}
			items := many(1000, func(int) object { return object{"b": "x", "c": "y"} })
			for i := range 10 {
				if err := a.prepare(widgets, widget("v1", fmt.Sprintf("w%d", i), object{"a": items})); err != nil {
					return err
				}
			}
			return nil
		},
		run: func(ctx context.Context, a *attempt) {
			times(ctx, 5, 2, func(int) {
				a.ask(
					ctx,
					request{
						as:     tenant,
						method: http.MethodGet,
						path:   widgets,
						header: http.Header{"Accept": {tableMedia}},
					},
				)
			})
		},
	}
}
