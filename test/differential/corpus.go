package main

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"sigs.k8s.io/yaml"

	"watershed.dev/test/harness"
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
	var index metav1.RootPaths
	get("/", "", &index)
	for _, path := range index.Paths {
		if page, check, _ := strings.Cut(path[1:], "/"); strings.HasSuffix(page, "z") && check != "" { // livez and others
			get(path, "", nil)
		}
	}
	for _, path := range []string{"/version", "/healthz", "/livez", "/readyz", "/nothing", "/api/v2",
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
	// Controllers of either server lag. untilEqual reads discovery, OpenAPI and the conditions of some kinds.
	// Conditions of other kinds show no progress.
	time.Sleep(2500 * time.Millisecond)
	for _, path := range []string{"/apis", "/openapi/v3"} {
		p.untilEqual(path)
	}
	for _, o := range all {
		switch o.kind.Kind {
		case "APIService", "CustomResourceDefinition", "FlowSchema":
			p.untilEqual(o.collection)
		case "Widget", "Global":
			p.untilEqual(root(o.kind.GroupVersion()))
		}
	}
}

// longLag is the lag of a controller that the test prints.
const longLag = 5 * time.Second

// untilEqual waits until both servers' responses differ in nothing but accepted differences, at most harness.Soon. A
// later request reports a difference that remains.
func (p *pair) untilEqual(path string) {
	r := &request{method: "GET", path: path, header: map[string]string{"Accept": "application/json"}, about: "list"}
	for began := time.Now(); time.Since(began) < harness.Soon; time.Sleep(50 * time.Millisecond) {
		a, b := p.both(p.t.Context(), r)
		if !slices.ContainsFunc(diff(a, b), func(d string) bool { return p.report.explained(r, a, b, d) == nil }) {
			if lag := time.Since(began); lag > longLag {
				fmt.Printf("both servers' responses to %s are equal after %v\n", path, lag.Round(time.Millisecond))
			}
			return
		}
	}
	fmt.Printf("the responses to %s still differ after %v\n", path, harness.Soon)
}

// until waits until both servers' responses contain a text.
func (p *pair) until(path, text string) { p.await(path, text, true) }

// untilGone waits until neither server's response contains a text.
func (p *pair) untilGone(path, text string) { p.await(path, text, false) }

func (p *pair) await(path, text string, there bool) {
	for _, s := range []*side{p.theirs, p.ours} {
		deadline := time.Now().Add(harness.Soon)
		for time.Now().Before(deadline) && bytes.Contains(s.do(p.t.Context(), &request{
			method: "GET",
			path:   path,
			header: map[string]string{"Accept": "application/json"},
		}).body, []byte(text)) != there {
			time.Sleep(50 * time.Millisecond)
		}
	}
}

func clone(m map[string]any) map[string]any {
	out := map[string]any{}
	if err := json.Unmarshal(must(json.Marshal(m)), &out); err != nil {
		panic(err)
	}
	return out
}
