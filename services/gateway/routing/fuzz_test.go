package routing

import (
	"math"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"

	"google.golang.org/protobuf/proto"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

func podsResource() *registryv1.APIResource {
	return &registryv1.APIResource{
		StorageResource:  "pods",
		Namespaced:       true,
		Table:            true,
		Verbs:            []string{"get", "list", "watch"},
		Resource:         &commonv1.Resource{Version: "v1", Resource: "pods"},
		Kind:             &commonv1.Kind{Version: "v1", Kind: "Pod"},
		MediaTypes:       []string{"application/json", "application/yaml", "application/vnd.kubernetes.protobuf"},
		SelectableFields: map[string]string{"metadata.name": "metadata.name", "spec.nodeName": "spec.nodeName"},
	}
}

func newRequestContext(query, accept string) *requestContext {
	req := &http.Request{
		Method: http.MethodGet,
		URL:    &url.URL{Path: "/api/v1/pods", RawQuery: query},
		Header: http.Header{},
	}
	if accept != "" {
		req.Header["Accept"] = []string{accept}
	}
	return &requestContext{
		router:      &Router{},
		w:           httptest.NewRecorder(),
		req:         req,
		info:        &request.RequestInfo{Verb: "list", Resource: "pods"},
		apiResource: podsResource(),
		dialect:     builtIn{},
	}
}

// TestShards checks that a shard selector is parsed and that it has no effect without its feature gate.
func TestShards(t *testing.T) {
	const selector = "shardRange(object.metadata.uid, '0x0000000000000000', '0x8000000000000000') || " +
		"shardRange(object.metadata.uid, '0xc000000000000000', '0x10000000000000000')"
	if s, err := shardOf("rubbish"); s != nil || err != nil {
		t.Errorf("without the gate: %v, %v", s, err)
	}
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
	want := &watchfanoutv1.Shard{Field: "object.metadata.uid", Selector: selector, Ranges: []*watchfanoutv1.HashRange{
		{First: 0, Last: 1<<63 - 1}, {First: 3 << 62, Last: math.MaxUint64}}}
	if s, err := shardOf(" " + selector); err != nil || !proto.Equal(s, want) {
		t.Errorf("%v, %v", s, err)
	}
	if s, err := shardOf(" "); err == nil || !strings.HasPrefix(err.Error(), "invalid shard selector: empty") {
		t.Errorf("%v, %v", s, err)
	}
}

// FuzzNegotiation checks that every Accept header leads to a served media type or an error.
func FuzzNegotiation(f *testing.F) {
	f.Add("application/json;as=Table;g=meta.k8s.io;v=v1,application/json")
	f.Add("*/*;q=0.1, application/yaml;pretty=1")
	f.Add("application/vnd.kubernetes.protobuf;stream=watch")
	f.Fuzz(func(t *testing.T, accept string) {
		c := newRequestContext("", accept)
		out, err := c.negotiate()
		if err != nil {
			return
		}
		if !slices.Contains(c.apiResource.MediaTypes, out.MediaType) {
			t.Errorf("%q is answered in %q", accept, out.MediaType)
		}
	})
}

// FuzzListOptions checks that a list either goes to the watch tier with a valid query, or to registry. The key of a
// shared list depends only on parameters that affect the list.
func FuzzListOptions(f *testing.F) {
	f.Add("limit=5&continue=x&labelSelector=a%3Db&fieldSelector=metadata.name%3Dx")
	f.Add("resourceVersion=%FF&timeoutSeconds=-1&fieldSelector=nobody%3Dx")
	f.Fuzz(func(t *testing.T, query string) {
		c := newRequestContext(query, "")
		c.out = &registryv1.Output{MediaType: "application/json"}
		p, err := c.plan()
		if err == nil && p.query != nil && (p.query.Resource == nil || p.query.Namespace != "" || p.source == nil) {
			t.Errorf("%q is %v", query, p)
		}
		values := c.req.URL.Query()
		key := listQuery(values)
		if again := listQuery(values); again != key || values.Has("pretty") {
			t.Errorf("%q: %q and %q", query, key, again)
		}
	})
}
