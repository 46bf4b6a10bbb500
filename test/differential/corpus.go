package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"
)

//go:embed objects.yaml
var objects string

// namespace is the namespace of the corpus's objects.
const namespace = "diff"

// object is a valid object and its resource.
type object struct {
	kind       schema.GroupVersionKind
	resource   metav1.APIResource
	collection string
	name       string
	body       map[string]any
}

func (o *object) path() string { return o.collection + "/" + o.name }

func (o *object) json() []byte { return must(json.Marshal(o.body)) }

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// discovered is the API that a server's discovery lists.
type discovered struct {
	lists []*metav1.APIResourceList
	kinds map[schema.GroupVersionKind]metav1.APIResource
}

// discover compares every page of discovery, and returns kube-apiserver's.
func (p *pair) discover() *discovered {
	d := &discovered{kinds: map[schema.GroupVersionKind]metav1.APIResource{}}
	get := func(path, accept string, into any) {
		a := p.ask(&request{method: "GET", path: path, header: map[string]string{"Accept": accept}, about: "discovery"})
		if into != nil {
			_ = json.Unmarshal(a.body, into)
		}
	}
	var groups metav1.APIGroupList
	get("/apis", "application/json", &groups)
	for _, path := range []string{"/api", "/apis"} {
		for _, accept := range []string{"", "application/yaml", "application/vnd.kubernetes.protobuf",
			"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList",
			"application/json;g=apidiscovery.k8s.io;v=v2beta1;as=APIGroupDiscoveryList", "text/html"} {
			get(path, accept, nil)
		}
	}
	for _, path := range []string{"/", "/version", "/healthz", "/livez", "/readyz", "/nothing", "/api/v2",
		"/apis/nothing", "/apis/apps/v2", "/apis/apps/", "/openapi/v3", "/api/v1/", "/apis/apps/v1/nothing"} {
		get(path, "", nil)
	}
	versions := []string{"/api/v1"}
	for _, g := range groups.Groups {
		get("/apis/"+g.Name, "", nil)
		for _, v := range g.Versions {
			versions = append(versions, "/apis/"+v.GroupVersion)
		}
	}
	for _, path := range versions {
		list := &metav1.APIResourceList{}
		get(path, "application/json", list)
		d.lists = append(d.lists, list)
		gv, _ := schema.ParseGroupVersion(list.GroupVersion)
		for _, r := range list.APIResources {
			if !strings.Contains(r.Name, "/") {
				d.kinds[gv.WithKind(r.Kind)] = r
			}
		}
	}
	return d
}

// valid returns the corpus's objects.
func (d *discovered) valid() []*object {
	var all []*object
	for _, doc := range strings.Split(objects, "\n---\n") {
		body := map[string]any{}
		if err := yaml.Unmarshal([]byte(doc), &body); err != nil {
			panic(fmt.Sprintf("%v: %s", err, doc))
		}
		all = append(all, d.object(body))
	}
	return all
}

func (d *discovered) object(body map[string]any) *object {
	gv, _ := schema.ParseGroupVersion(body["apiVersion"].(string))
	o := &object{kind: gv.WithKind(body["kind"].(string)), body: body}
	r, ok := d.kinds[o.kind]
	if !ok { // a custom resource of the corpus
		plural := strings.ToLower(o.kind.Kind) + "s"
		r = metav1.APIResource{
			Name:       plural,
			Namespaced: o.kind.Kind == "Widget",
			Kind:       o.kind.Kind,
			Verbs:      []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"},
		}
	}
	o.resource = r
	o.collection = root(gv)
	if r.Namespaced {
		o.collection += "/namespaces/" + namespace
	}
	o.collection += "/" + r.Name
	if m, ok := body["metadata"].(map[string]any); ok {
		o.name, _ = m["name"].(string)
	}
	return o
}

func root(gv schema.GroupVersion) string {
	if gv.Group == "" {
		return "/api/" + gv.Version
	}
	return "/apis/" + gv.String()
}

var jsonBody = map[string]string{"Content-Type": "application/json"}

// accepts are the Accept headers of the requests.
var accepts = []string{"", "application/json", "application/yaml", "application/vnd.kubernetes.protobuf",
	"application/cbor", "text/plain", "*/*",
	"application/json;as=Table;g=meta.k8s.io;v=v1",
	"application/json;as=Table;g=meta.k8s.io;v=v1beta1,application/json",
	"application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
	"application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
	"application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;g=meta.k8s.io;v=v1",
	"application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1",
	"application/yaml;as=Table;g=meta.k8s.io;v=v1", "application/json;as=Nothing;g=meta.k8s.io;v=v1"}

// create creates every object. After a CRD it waits until the CRD is established.
func (p *pair) create(all []*object) {
	p.ask(&request{
		method: "POST",
		path:   "/api/v1/namespaces",
		header: jsonBody,
		body:   []byte(`{"metadata":{"name":"` + namespace + `"}}`),
		about:  "namespace",
	})
	for _, o := range all {
		p.ask(&request{
			method: "POST",
			path:   o.collection + "?dryRun=All",
			header: jsonBody,
			body:   o.json(),
			about:  "dry run",
		})
		p.ask(&request{method: "POST", path: o.collection, header: jsonBody, body: o.json(), about: "create"})
		if o.kind.Kind == "CustomResourceDefinition" {
			p.until(o.path(), `"reason":"InitialNamesAccepted"`)
		}
		p.ask(&request{method: "POST", path: o.collection, header: jsonBody, body: o.json(), about: "create again"})
	}
	// kube-apiserver's controllers (discovery, OpenAPI, conditions) lag, and not all of them show their progress.
	time.Sleep(2500 * time.Millisecond)
}

// until waits until both servers' responses contain a text.
func (p *pair) until(path, text string) { p.await(path, text, true) }

// untilGone waits until neither server's response contains a text.
func (p *pair) untilGone(path, text string) { p.await(path, text, false) }

func (p *pair) await(path, text string, there bool) {
	for _, s := range []*side{p.theirs, p.ours} {
		deadline := time.Now().Add(20 * time.Second)
		for time.Now().Before(deadline) && bytes.Contains(s.do(p.t.Context(), &request{
			method: "GET",
			path:   path,
			header: map[string]string{"Accept": "application/json"},
		}).body, []byte(text)) != there {
			time.Sleep(50 * time.Millisecond)
		}
	}
}

// verbs sends every verb for every object.
func (p *pair) verbs(all []*object) {
	get := func(path, accept, about string) {
		h := map[string]string{}
		if accept != "" {
			h["Accept"] = accept
		}
		p.ask(&request{method: "GET", path: path, header: h, about: about})
	}
	for _, o := range all {
		if o.name == "" {
			continue
		}
		for _, accept := range accepts {
			get(o.path(), accept, "get")
			get(o.collection, accept, "list")
		}
		for _, query := range []string{"?limit=1", "?labelSelector=app%3Da", "?labelSelector=%3D%3D",
			"?fieldSelector=metadata.name%3D" + o.name, "?fieldSelector=spec.nothing%3Dx", "?resourceVersion=0",
			"?resourceVersion=abc", "?resourceVersionMatch=Exact", "?limit=1&continue=xyz", "?pretty=true",
			"?watch=1&timeoutSeconds=1&resourceVersion=abc", "?limit=abc", "?sendInitialEvents=true"} {
			get(o.collection+query, "", "list with options")
		}
		for _, query := range []string{"?resourceVersion=0", "?pretty=1", "?export=true"} {
			get(o.path()+query, "", "get with options")
		}
		get(o.path()+"x", "", "get nothing")
		get(o.path()+"/status", "", "get status")
		get(o.path()+"/scale", "", "get scale")
		get(o.path()+"/nothing", "", "get a subresource that is none")
		for _, m := range []string{"POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE"} {
			p.ask(&request{method: m, path: o.path() + "/nothing", about: "odd method"})
		}
		p.ask(&request{
			method: "PUT",
			path:   o.collection,
			header: jsonBody,
			body:   o.json(),
			about:  "update of a collection",
		})
		p.ask(&request{method: "POST", path: o.path(), header: jsonBody, body: o.json(), about: "create of an object"})
		p.ask(&request{method: "HEAD", path: o.path(), about: "head"})
		p.ask(&request{
			method: "PATCH",
			path:   o.collection,
			header: map[string]string{"Content-Type": "application/merge-patch+json"},
			body:   []byte(`{}`),
			about:  "patch of a collection",
		})
		p.update(o)
		if o.kind.Kind == "CustomResourceDefinition" { // an update of its status has removed its accepted names
			p.until(o.path(), `"reason":"InitialNamesAccepted"`)
		}
		p.patch(o)
	}
}

func (p *pair) update(o *object) {
	put := func(path, body, about string) {
		p.ask(&request{method: "PUT", path: path, header: jsonBody, body: []byte(body), about: about})
	}
	plain := string(o.json())
	put(o.path(), plain, "update without version")
	with := func(meta map[string]any) string {
		body := clone(o.body)
		m := body["metadata"].(map[string]any)
		for k, v := range meta {
			m[k] = v
		}
		return string(must(json.Marshal(body)))
	}
	put(o.path(), with(map[string]any{
		"resourceVersion": versionOf(o.path()),
		"labels":          map[string]any{"app": "a", "updated": "yes"},
	}), "update")
	put(o.path()+"?dryRun=All", with(map[string]any{
		"resourceVersion": versionOf(o.path()),
		"annotations":     map[string]any{"dry": "run"},
	}), "update dry run")
	put(o.path(), with(map[string]any{"resourceVersion": "1"}), "update of an old version")
	put(o.path(), with(map[string]any{"name": "other"}), "update with another name")
	put(o.path(), with(map[string]any{"namespace": "other"}), "update with another namespace")
	put(o.path(), with(map[string]any{"uid": "other"}), "update with another uid")
	put(o.path()+"x", plain, "update of nothing")
	put(o.path()+"/status", with(map[string]any{"resourceVersion": versionOf(o.path())}), "update of status")
	if o.kind.Kind == "FlowSchema" { // flow control restores the removed condition later
		p.until(o.path(), `"type":"Dangling"`)
	}
	put(o.path()+"?fieldManager="+strings.Repeat("x", 200), plain, "long field manager")
	put(o.path()+"?dryRun=Some", plain, "odd dry run")
	put(o.path()+"?fieldValidation=Odd", plain, "odd field validation")
	unknown := clone(o.body)
	unknown["unknown"] = 1
	for _, v := range []string{"Strict", "Warn", "Ignore"} {
		put(o.path()+"?dryRun=All&fieldValidation="+v, string(must(json.Marshal(unknown))), "unknown field "+v)
	}
	put(o.path()+"?dryRun=All&fieldValidation=Strict",
		strings.Replace(plain, `"kind":`, `"kind":"Twice","kind":`, 1), "duplicate field")
	put(o.path(), `{"kind":"Nothing","apiVersion":"v1","metadata":{"name":"x"}}`, "another kind")
	put(o.path(), `[]`, "an array")
	put(o.path(), `{`, "half an object")
	put(o.path(), ``, "nothing at all")
}

func (p *pair) patch(o *object) {
	patch := func(path, contentType, body, about string) {
		p.ask(&request{
			method: "PATCH",
			path:   path,
			header: map[string]string{"Content-Type": contentType},
			body:   []byte(body),
			about:  about,
		})
	}
	const jsonPatch, merge, strategic, apply = "application/json-patch+json", "application/merge-patch+json", "application/strategic-merge-patch+json", "application/apply-patch+yaml"
	patch(o.path(), jsonPatch, `[{"op":"add","path":"/metadata/annotations","value":{"p":"1"}}]`, "json patch")
	patch(o.path(), jsonPatch, `[{"op":"test","path":"/metadata/name","value":"no"}]`, "json patch test")
	patch(o.path(), jsonPatch, `[{"op":"remove","path":"/nothing"}]`, "json patch remove nothing")
	patch(o.path(), jsonPatch, `[{"op":"odd","path":"/metadata"}]`, "json patch odd op")
	patch(o.path(), jsonPatch, `{}`, "json patch object")
	patch(o.path(), jsonPatch, `[{"op":"replace","path":"/metadata/resourceVersion","value":"1"}]`,
		"json patch old version")
	patch(o.path(), merge, `{"metadata":{"labels":{"m":"1"}}}`, "merge patch")
	patch(o.path(), merge, `{"metadata":{"labels":{"m":null}}}`, "merge patch null")
	patch(o.path(), merge, `{"metadata":{"labels":{"-bad-":"1"}}}`, "merge patch bad label")
	patch(o.path(), merge, `{"metadata":{"name":"other"}}`, "merge patch name")
	patch(o.path(), merge, `{"spec":"odd"}`, "merge patch wrong type")
	patch(o.path(), merge, `[]`, "merge patch array")
	patch(o.path(), merge, `{"unknown":1}`, "merge patch unknown")
	patch(o.path()+"?fieldValidation=Strict", merge, `{"unknown":1}`, "merge patch unknown strict")
	patch(o.path()+"?dryRun=All", merge, `{"metadata":{"labels":{"dry":"1"}}}`, "merge patch dry")
	patch(o.path()+"?force=true", merge, `{}`, "merge patch force")
	patch(o.path(), strategic, `{"metadata":{"labels":{"s":"1"}}}`, "strategic patch")
	patch(o.path(), strategic, `{"metadata":{"finalizers":["example.com/f"]}}`, "strategic finalizers")
	patch(o.path(), strategic, `{"metadata":{"$deleteFromPrimitiveList/finalizers":["example.com/f"]}}`,
		"strategic delete finalizers")
	patch(o.path(), merge, `{"metadata":{"finalizers":null}}`, "merge no finalizers")
	patch(o.path(), strategic, `{"$patch":"odd"}`, "strategic odd directive")
	patch(o.path(), "application/odd", `{}`, "odd patch type")
	patch(o.path()+"x", merge, `{}`, "merge patch of nothing")
	patch(o.path()+"/status", merge, `{"status":{"phase":"x","replicas":1}}`, "merge patch of status")
	patch(o.path()+"/scale", merge, `{"spec":{"replicas":2}}`, "merge patch of scale")
	patch(o.path()+"?fieldManager=one", apply, string(o.json()), "apply")
	patch(o.path(), apply, string(o.json()), "apply without manager")
	changed := clone(o.body)
	changed["metadata"].(map[string]any)["labels"] = map[string]any{"app": "conflict"}
	patch(o.path()+"?fieldManager=two", apply, string(must(json.Marshal(changed))), "apply conflict")
	patch(o.path()+"?fieldManager=two&force=true", apply, string(must(json.Marshal(changed))), "apply by force")
	patch(o.path()+"?fieldManager=two", apply,
		`{"apiVersion":"`+o.kind.GroupVersion().String()+`","kind":"`+o.kind.Kind+`","metadata":{"name":"`+o.name+`"}}`,
		"apply less")
	patch(o.path()+"?fieldManager=two", apply,
		`{"apiVersion":"other/v1","kind":"`+o.kind.Kind+`","metadata":{"name":"`+o.name+`"}}`, "apply another version")
	patch(o.path()+"?fieldManager=two", apply, `{`, "apply half")
	patch(o.path()+"?fieldManager=two", apply, `{"metadata":{"managedFields":[{"manager":"x"}]}}`,
		"apply managed fields")
}

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

// mutate changes one or two places of v, and returns a description of the changes.
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

func clone(m map[string]any) map[string]any {
	out := map[string]any{}
	if err := json.Unmarshal(must(json.Marshal(m)), &out); err != nil {
		panic(err)
	}
	return out
}

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
				variant := map[string]any{"apiVersion": body["apiVersion"], "kind": body["kind"], "metadata": m, k: body[k]}
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

// remove deletes every object, with varying delete options.
func (p *pair) remove(all []*object) {
	for i, o := range slices.Backward(all) {
		if o.name == "" {
			continue
		}
		del := func(path, body, about string) {
			h := map[string]string{}
			if body != "" {
				h = jsonBody
			}
			p.ask(&request{method: http.MethodDelete, path: path, header: h, body: []byte(body), about: about})
		}
		del(o.path()+"?dryRun=All", "", "delete dry run")
		// a CRD's finalizer removes it at a time that differs between the sides
		if o.kind.Kind == "CustomResourceDefinition" {
			del(o.path(), "", "delete")
			continue
		}
		del(o.path(), `{"preconditions":{"uid":"other"}}`, "delete with another uid")
		del(o.path(), `{"preconditions":{"resourceVersion":"1"}}`, "delete of an old version")
		del(o.path(), `{"propagationPolicy":"Odd"}`, "delete with odd propagation")
		del(o.path(), `{"kind":"Nothing"}`, "delete with odd options")
		del(o.path(), `{"gracePeriodSeconds":-1}`, "delete with negative grace")
		del(o.path()+"x", "", "delete nothing")
		switch i % 4 {
		case 0:
			del(o.path(), "", "delete")
		case 1:
			del(o.path(), `{"preconditions":{"uid":"`+uidOf(o.path())+`"},"gracePeriodSeconds":0}`, "delete with uid")
		case 2:
			del(o.path(), `{"propagationPolicy":"Foreground"}`, "delete in the foreground")
			p.ask(&request{method: "GET", path: o.path(), about: "get what is deleted in the foreground"})
		case 3:
			del(o.collection+"?labelSelector=nothing%3Dhere", "", "delete a collection of nothing")
			if o.resource.Namespaced {
				del(o.collection+"?fieldSelector=metadata.name%3D"+o.name,
					`{"propagationPolicy":"Orphan"}`, "delete a collection")
			}
		}
		del(o.path(), "", "delete again")
	}
}
