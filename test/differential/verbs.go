package main

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
)

// verbs sends every verb for every object.
func (p *pair) verbs(all []*object) {
	get := func(path, accept, about string) {
		h := map[string]string{}
		if accept != "" {
			h["Accept"] = accept
		}
		p.ask(&request{method: "GET", path: path, header: h, about: about})
	}
	p.ask(&request{
		method: "POST",
		path:   "/api/v1/persistentvolumes?dryRun=All",
		header: jsonBody,
		body: []byte(`{"apiVersion":"v1","kind":"PersistentVolume","metadata":{"name":"empty"},` +
			`"spec":{"capacity":{},"accessModes":["ReadWriteOnce"],"hostPath":{"path":"/x"}}}`),
		about: "an empty map",
	})
	for _, o := range all {
		if o.name == "" {
			continue
		}
		for _, accept := range accepts {
			get(o.path(), accept, "get")
			get(o.collection, accept, "list")
		}
		get(o.collection+"?labelSelector=none%3Dx", "application/json;as=Table;g=meta.k8s.io;v=v1", "an empty Table")
		for _, query := range []string{"?limit=1", "?labelSelector=app%3Da", "?labelSelector=%3D%3D",
			"?fieldSelector=metadata.name%3D" + o.name, "?fieldSelector=spec.nothing%3Dx", "?resourceVersion=0",
			"?resourceVersion=0&limit=1", "?resourceVersion=0&limit=1&pretty=true",
			"?resourceVersion=abc", "?resourceVersionMatch=Exact", "?limit=1&continue=xyz", "?pretty=true",
			"?watch=1&timeoutSeconds=1&resourceVersion=abc", "?limit=abc", "?sendInitialEvents=true"} {
			get(o.collection+query, "", "list with options")
		}
		for _, query := range []string{"?resourceVersion=0", "?resourceVersion=abc", "?resourceVersion=-1", "?pretty=1",
			"?export=true"} {
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
		p.ask(&request{
			method: "POST",
			path:   o.collection + "?fieldValidation=Bogus",
			header: map[string]string{"Content-Type": "text/plain"},
			body:   o.json(),
			about:  "create with wrong options and media type",
		})
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
	const jsonPatch, merge, strategic, apply = "application/json-patch+json", "application/merge-patch+json",
		"application/strategic-merge-patch+json", "application/apply-patch+yaml"
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
