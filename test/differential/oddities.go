package main

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// paths sends unusual paths: encoded slashes, dots, doubled slashes, invalid names.
func (p *pair) paths() {
	base := "/api/v1/namespaces/" + namespace
	for _, path := range []string{
		base + "/configmaps/a%2Fb", base + "/configmaps/..", base + "/configmaps/%2e%2e",
		base + "/configmaps/%2e%2e%2fsecrets", base + "/configmaps/.", base + "//configmaps", "//api/v1/pods",
		base + "/configmaps/../secrets", "/api/v1/namespaces/%2e%2e/pods", "/api/v1/namespaces//pods",
		base + "/configmaps/%00", base + "/configmaps/a%20b", base + "/configmaps/ä", base + "/configmaps/cm%2Fstatus",
		"/apis/apps/v1/namespaces/" + namespace + "/deployments/deploy%2Fscale",
		"/api/v1/watch/namespaces/" + namespace + "/configmaps?timeoutSeconds=0&resourceVersion=abc",
		"/api/v1/namespaces/" + namespace + "/pods/pod/exec",
		"/api/v1/namespaces/" + namespace + "/pods/nothing/exec?command=x",
		"/api/v1/namespaces/" + namespace + "/pods/nothing/log",
		"/api/v1/namespaces/" + namespace + "/pods/pod/log?container=nothing",
		"/api/v1/namespaces/" + namespace + "/pods/pod/log?tailLines=-1",
		"/api/v1/namespaces/" + namespace + "/pods/nothing/proxy/x",
		"/api/v1/namespaces/" + namespace + "/services/nothing/proxy/", "/api/v1/nodes/nothing/proxy/healthz",
		"/api/v1/namespaces/" + namespace + "/pods/pod/portforward",
		"/api/v1/namespaces/" + namespace + "/pods/pod/attach",
		"/apis/diff.example.com/v1/namespaces/" + namespace + "/widgets/a%2Fb",
		"/apis/diff.example.com/v1/widgets/widget",
		"/apis/diff.example.com/v1/namespaces/" + namespace + "/globals/global",
		"/apis/diff.example.com/v1alpha1/namespaces/" + namespace + "/widgets",
		"/apis/diff.example.com/v2/widgets", "/apis/diff.example.com/v1/nothings", "/apis/diff.example.com",
		"/apis/diff.example.com/v1", "/apis/diff.example.com/v1alpha1", "/apis/diff.example.com/v1/",
		"/api/v1/watch/nodes/node/proxy/run/x", "/api/v1/watch/namespaces/" + namespace + "/pods/pod/proxy/x",
		"/api/v1/watch/namespaces/" + namespace + "/pods/pod/exec?command=x",
		"/api/v1/watch/namespaces/" + namespace + "/pods/pod/log",
		"/api/v1/namespaces/" + namespace + "/pods//proxy/?fieldSelector=metadata.name%3Dpod",
		"/api/v1/nodes//proxy/?fieldSelector=metadata.name%3Dnode",
		"/api/v1/namespaces/" + namespace + "/pods//exec?fieldSelector=metadata.name%3Dpod",
		"/api/v1/namespaces/" + namespace + "/pods/pod/exec?dryRun=All&command=x",
		"/api/v1/namespaces/" + namespace + "/status/x", "/api/v1/nodes/node/status/x/y",
		base + "/services/svc/status/x",
		"/apis/apiregistration.k8s.io/v1/apiservices/v1.apps/status/x", "/apis/apiregistration.k8s.io",
		"/apis/none.example.com/v1", "/apis/none.example.com/v1/things", "/apis/none.example.com",
	} {
		for _, method := range []string{"GET", "DELETE", "POST"} {
			r := &request{method: method, path: path, about: "odd path"}
			if method != "GET" {
				r.header, r.body = jsonBody, []byte(`{"dryRun":["All"]}`)
			}
			p.ask(r)
		}
	}
	for _, accept := range []string{"text/plain", "application/xml", "*/*", "application/yaml"} {
		p.ask(&request{method: "GET", path: base + "/pods/nothing/log", header: map[string]string{"Accept": accept},
			about: "media type of logs"})
	}
	p.ask(&request{method: "GET", path: "/api/v1/componentstatuses/nothing?resourceVersion=abc", about: "odd revision"})
	for _, t := range []string{"text/plain, application/merge-patch+json", "text/plain, application/json", ","} {
		p.ask(&request{method: "PATCH", path: base + "/configmaps/cm", header: map[string]string{"Content-Type": t},
			body: []byte(`{}`), about: "odd media type of a patch"})
	}
	for _, h := range []map[string]string{{"X-Remote-User": "bob"}, {
		"X-Remote-User":  "bob",
		"X-Remote-Group": "system:masters",
	}, {"Impersonate-User": "bob"}, {"Impersonate-Group": "x"}, {"Impersonate-User": "bob", "Impersonate-Uid": "1"},
		{"Authorization": "Bearer nonsense"}, {"Content-Type": "application/json"}, {"Accept-Encoding": "gzip"},
		{"Accept": ";;"}, {"Accept": "application/json;q=0"}, {"Accept": "application/json;v=2"}} {
		p.ask(&request{method: "GET", path: base + "/configmaps", header: h, about: "odd header"})
		p.ask(&request{
			method: "POST",
			path:   "/apis/authentication.k8s.io/v1/selfsubjectreviews",
			header: merged(jsonBody, h),
			body:   []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`),
			about:  "who am I",
		})
	}
}

func merged(a, b map[string]string) map[string]string {
	out := maps.Clone(a)
	maps.Copy(out, b)
	return out
}

// definitions sends CustomResourceDefinitions with many kinds of errors, as dry runs.
func (p *pair) definitions() {
	property := func(schema string) string { return `{"type":"object","properties":{"a":` + schema + `}}` }
	rule := func(r string) string {
		return `{"type":"object","properties":{"a":{"type":"string"}},"x-kubernetes-validations":[` + r + `]}`
	}
	schemas := map[string]string{
		"not an object":       `{"type":"string"}`,
		"unknown type":        `{"type":"odd"}`,
		"no type of property": property(`{}`),
		"array without items": property(`{"type":"array"}`),
		"bad pattern":         property(`{"type":"string","pattern":"("}`),
		"wrong default":       property(`{"type":"integer","default":"x"}`),
		"default too large":   property(`{"type":"integer","maximum":3,"default":9}`),
		"default in metadata": `{"type":"object","properties":{"metadata":{"type":"object",` +
			`"properties":{"name":{"type":"string","default":"x"}}}}}`,
		"additional and fixed": property(`{"type":"object","properties":{"b":{"type":"string"}},` +
			`"additionalProperties":{"type":"string"}}`),
		"not in allOf":      `{"type":"object","allOf":[{"type":"object","properties":{"x":{"type":"string"}}}]}`,
		"ref":               property(`{"$ref":"#/x"}`),
		"unique items":      property(`{"type":"array","uniqueItems":true,"items":{"type":"string"}}`),
		"CEL syntax":        `{"type":"object","x-kubernetes-validations":[{"rule":"self.a ==="}]}`,
		"CEL unknown field": rule(`{"rule":"self.b == 'x'"}`),
		"CEL not a bool":    rule(`{"rule":"self.a"}`),
		"CEL types":         rule(`{"rule":"self.a > 1"}`),
		"CEL costs too much": property(`{"type":"array","items":{"type":"array","items":{"type":"string"}},` +
			`"x-kubernetes-validations":[{"rule":"self.all(x, x.all(y, self.all(z, z.all(w, w == y))))"}]}`),
		"CEL message":      rule(`{"rule":"self.a == 'x'","message":"  "}`),
		"CEL message expr": rule(`{"rule":"self.a == 'x'","messageExpression":"1 + 1"}`),
		"CEL reason":       rule(`{"rule":"self.a == 'x'","reason":"Odd"}`),
		"CEL field path":   rule(`{"rule":"self.a == 'x'","fieldPath":".nothing"}`),
		"list map keys": property(`{"type":"array","x-kubernetes-list-type":"map",` +
			`"x-kubernetes-list-map-keys":["k"],"items":{"type":"object","properties":{"x":{"type":"string"}}}}`),
		"odd list type": property(`{"type":"array","x-kubernetes-list-type":"odd","items":{"type":"string"}}`),
		"odd map type":  `{"type":"object","x-kubernetes-map-type":"odd"}`,
		"embedded":      property(`{"type":"object","x-kubernetes-embedded-resource":true}`),
		"int or string": property(`{"type":"string","x-kubernetes-int-or-string":true}`),
		"fine":          property(`{"type":"string"}`),
	}
	try := func(about, spec, name string) {
		body := fmt.Sprintf(`{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",`+
			`"metadata":{"name":%q},"spec":%s}`, name, spec)
		p.ask(&request{
			method: "POST",
			path:   "/apis/apiextensions.k8s.io/v1/customresourcedefinitions?dryRun=All",
			header: jsonBody,
			body:   []byte(body),
			about:  about,
		})
	}
	const plain = `{"type":"object"}`
	version := func(schema, more string) string {
		return `{"name":"v1","served":true,"storage":true,"schema":{"openAPIV3Schema":` + schema + `}` + more + `}`
	}
	spec := func(versions, more string) string {
		return `{"group":"odd.example.com","scope":"Namespaced","names":{"plural":"odds","kind":"Odd"},"versions":[` +
			versions + `]` + more + `}`
	}
	for _, about := range slices.Sorted(maps.Keys(schemas)) {
		try("schema: "+about, spec(version(schemas[about], ""), ""), "odds.odd.example.com")
	}
	conversion := func(strategy, url, version string) string {
		return `,"conversion":{"strategy":"` + strategy + `","webhook":{"clientConfig":{"url":"` + url +
			`"},"conversionReviewVersions":["` + version + `"]}}`
	}
	specs := map[string]string{
		"no versions":        spec("", ""),
		"two storage":        spec(version(plain, "")+","+strings.Replace(version(plain, ""), "v1", "v2", 1), ""),
		"same version twice": spec(version(plain, "")+","+version(plain, ""), ""),
		"no schema":          spec(`{"name":"v1","served":true,"storage":true}`, ""),
		"preserve unknown":   spec(version(plain, ""), `,"preserveUnknownFields":true`),
		"bad version name":   spec(strings.Replace(version(plain, ""), "v1", "V_1", 1), ""),
		"odd scope":          strings.Replace(spec(version(plain, ""), ""), "Namespaced", "Odd", 1),
		"no kind":            strings.Replace(spec(version(plain, ""), ""), `,"kind":"Odd"`, "", 1),
		"bad short name": strings.Replace(spec(version(plain, ""), ""), `"kind":"Odd"`,
			`"kind":"Odd","shortNames":["-x"]`, 1),
		"webhook without":  spec(version(plain, ""), `,"conversion":{"strategy":"Webhook"}`),
		"webhook none":     spec(version(plain, ""), conversion("None", "https://x/", "v1")),
		"webhook http":     spec(version(plain, ""), conversion("Webhook", "http://x/", "v1")),
		"webhook versions": spec(version(plain, ""), conversion("Webhook", "https://x/", "v9")),
		"scale path": spec(version(plain,
			`,"subresources":{"scale":{"specReplicasPath":"spec.replicas","statusReplicasPath":".status.replicas"}}`),
			""),
		"column path": spec(version(plain,
			`,"additionalPrinterColumns":[{"name":"x","type":"odd","jsonPath":"x"}]`), ""),
		"selectable object": spec(version(`{"type":"object","properties":{"a":{"type":"object"}}}`,
			`,"selectableFields":[{"jsonPath":".a"}]`), ""),
		"selectable nothing":  spec(version(plain, `,"selectableFields":[{"jsonPath":".nothing"}]`), ""),
		"deprecation warning": spec(version(plain, `,"deprecationWarning":"x"`), ""),
		"protected group":     strings.Replace(spec(version(plain, ""), ""), "odd.example.com", "odd.k8s.io", 1),
	}
	for _, about := range slices.Sorted(maps.Keys(specs)) {
		s := specs[about]
		name := "odds.odd.example.com"
		if about == "protected group" {
			name = "odds.odd.k8s.io"
		}
		try("definition: "+about, s, name)
	}
	try("another name", spec(version(plain, ""), ""), "others.odd.example.com")
	big := map[string]any{}
	for i := range 30000 {
		big[fmt.Sprintf("property%05d", i)] = map[string]any{"type": "string", "description": strings.Repeat("d", 60)}
	}
	try("too large for etcd", spec(version(string(must(json.Marshal(map[string]any{"type": "object",
		"properties": big}))), ""), ""), "odds.odd.example.com")
}
