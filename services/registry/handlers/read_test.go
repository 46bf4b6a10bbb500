package handlers_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// Reads respond as kube-apiserver does, with its errors for invalid options.
func TestReads(t *testing.T) {
	fx := fixture.New(t)
	var rv string
	for i := range 5 {
		run(t, fx, write{verb: "create", body: configMap(fmt.Sprint("r", i), "}"), code: 201,
			check: func(_ *testing.T, o object) { rv = o.Metadata.ResourceVersion }})
	}
	for _, x := range []struct {
		query string
		items int
		fails string
	}{
		{"", 5, ""},
		{"limit=2", 2, ""},
		{"resourceVersion=0", 5, ""},
		{"resourceVersion=0&limit=2", 5, ""},
		{"resourceVersion=" + rv, 5, ""},
		{"resourceVersion=" + rv + "&resourceVersionMatch=Exact", 5, ""},
		{"fieldSelector=metadata.name%3Dr1", 1, ""},
		{"fieldSelector=metadata.name%21%3Dr1", 4, ""},
		{"fieldSelector=data.k%3Dv", 0, `400 BadRequest "data.k" is not a known field selector`},
		{"labelSelector=a%3Db", 0, ""},
		{"labelSelector=%3D", 0, "400 BadRequest found '=', expected"},
		{"resourceVersionMatch=Exact", 0, "422 Invalid"},
		{"resourceVersion=99999999", 0, "504 Timeout Timeout: Too large resource version: 99999999"},
		{"continue=rubbish", 0, "400 BadRequest invalid continue token: continue key is not valid"},
		{"limit=x", 0, "400 BadRequest"},
	} {
		body, err := fx.List(t.Context(), fixture.ConfigMaps, &registryv1.GetRequest{Query: x.query})
		if x.fails != "" {
			if err == nil || !strings.HasPrefix(status(err), x.fails) {
				t.Errorf("%s: %s", x.query, status(err))
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %s", x.query, status(err))
			continue
		}
		if o := decodeObject(t, body); len(o.Items) != x.items || o.Kind != "ConfigMapList" {
			t.Errorf("%s: %d items of a %s", x.query, len(o.Items), o.Kind)
		}
	}
	for name, x := range map[string]struct {
		get   *registryv1.GetRequest
		code  int32
		has   string
		fails string
	}{
		"an object": {&registryv1.GetRequest{Name: "r1"}, http.StatusOK, `"kind":"ConfigMap"`, ""},
		"yaml": {&registryv1.GetRequest{
			Name:   "r1",
			Output: &registryv1.Output{MediaType: "application/yaml"},
		}, http.StatusOK, "kind: ConfigMap\n", ""},
		"as a Table": {&registryv1.GetRequest{
			Name: "r1",
			Output: &registryv1.Output{
				MediaType: "application/json",
				As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"},
			},
		}, http.StatusOK, `"kind":"Table"`, ""},
		"its metadata": {&registryv1.GetRequest{
			Name: "r1",
			Output: &registryv1.Output{
				MediaType: "application/json",
				As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadata"},
			},
		}, http.StatusOK, `"kind":"PartialObjectMetadata"`, ""},
		"nothing": {&registryv1.GetRequest{Name: "none"}, 0, "", `404 NotFound configmaps "none" not found`},
		"no name": {&registryv1.GetRequest{}, 0, "", "400 BadRequest name must be provided"},
		"an export": {&registryv1.GetRequest{Name: "r1", Query: "export=true"}, 0, "",
			"400 BadRequest the export parameter, deprecated since v1.14, is no longer supported"},
	} {
		resp, err := fx.Get(t.Context(), fixture.ConfigMaps, x.get)
		switch {
		case x.fails != "":
			if err == nil || !strings.HasPrefix(status(err), x.fails) {
				t.Errorf("%s: %s", name, status(err))
			}
		case err != nil:
			t.Errorf("%s: %s", name, status(err))
		case resp.Code != x.code || !strings.Contains(string(resp.Body), x.has):
			t.Errorf("%s: %d %.200s", name, resp.Code, resp.Body)
		}
	}
}
