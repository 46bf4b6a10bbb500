package discovery

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	apidiscoveryv2 "k8s.io/api/apidiscovery/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/platform/discovery"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/aggregation"
)

func entry(group, version, resource, kind string, custom bool) *registryv1.APIResource {
	return &registryv1.APIResource{
		Resource:     &commonv1.Resource{Group: group, Version: version, Resource: resource},
		Kind:         &commonv1.Kind{Group: group, Version: version, Kind: kind},
		Namespaced:   true,
		Unstructured: custom,
		Verbs:        []string{"get", "list"},
	}
}

func handler(t *testing.T) *Handler {
	t.Helper()
	proxy, err := aggregation.New(&aggregation.Config{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	notEstablished := entry("example.com", "v1", "secrets", "Hidden", true)
	notEstablished.NotEstablished = true
	view := discovery.NewView(&registryv1.DiscoveryResponse{
		Resources: []*registryv1.APIResource{
			entry("", "v1", "pods", "Pod", false),
			entry("apps", "v1", "deployments", "Deployment", false),
			entry("apps", "v8", "gadgets", "Gadget", true),
			entry("example.com", "v1", "widgets", "Widget", true),
			notEstablished,
		},
		Groups: []*registryv1.Group{
			{Name: "", Versions: []string{"v1"}},
			{Name: "apps", GroupPriorityMinimum: 3, Versions: []string{"v1", "v8"}},
			{Name: "metrics.k8s.io", GroupPriorityMinimum: 2, Versions: []string{"v1"}},
			{Name: "example.com", GroupPriorityMinimum: 1, Versions: []string{"v1"}},
		},
		ApiServices: []*registryv1.APIService{{Group: "metrics.k8s.io", Version: "v1"}},
	})
	h := &Handler{Address: "10.0.0.1:6443", Aggregated: aggregation.NewDiscoveryManager(proxy, func() {})}
	h.Set(view)
	return h
}

func get(h http.Handler, method, path, accept string) (int, string) {
	req := httptest.NewRequest(method, path, nil)
	if accept != "" {
		req.Header.Set("Accept", accept)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w.Code, w.Body.String()
}

// Discovery lists every group and version in the view's order, and omits resources that are not established.
func TestDiscoveryListsServedResources(t *testing.T) {
	h := handler(t)
	for _, x := range []struct {
		method, path string
		code         int
		has          string
	}{
		{"GET", "/api", 200, `"serverAddress":"10.0.0.1:6443"`},
		{"GET", "/api/v1", 200, `"name":"pods"`},
		{"GET", "/apis", 200, `"name":"apps"`},
		{"GET", "/apis/apps", 200, `"kind":"APIGroup"`},
		{"GET", "/apis/apps/v1", 200, `"name":"deployments"`},
		{"GET", "/apis/example.com/v1", 200, `"name":"widgets"`},
		{"POST", "/api/v1", 405, ""},
		{"POST", "/apis/apps/v1", 405, ""},
		{"GET", "/apis/none", 404, "404 page not found"},
		{"GET", "/apis/apps/v9", 404, "could not find"},
		{"GET", "/apis/example.com/v9", 404, "404 page not found"},
		{"GET", "/apis/apps/v1/x/y", 404, ""},
	} {
		code, body := get(h, x.method, x.path, "")
		if code != x.code || !strings.Contains(body, x.has) || strings.Contains(body, "Hidden") {
			t.Errorf("%s %s: %d %.300s", x.method, x.path, code, body)
		}
	}
	var groups metav1.APIGroupList
	_, body := get(h, "GET", "/apis", "")
	if err := json.Unmarshal([]byte(body), &groups); err != nil || len(groups.Groups) != 3 ||
		groups.Groups[0].Name != "apps" || groups.Groups[2].Name != "example.com" {
		t.Errorf("%v: %s", err, body)
	}
}

// The aggregated document has the same content. A group version of an aggregated server is stale until its discovery is
// known.
func TestAggregatedDiscovery(t *testing.T) {
	code, body := get(handler(t), "GET", "/apis",
		"application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList")
	var list apidiscoveryv2.APIGroupDiscoveryList
	if err := json.Unmarshal([]byte(body), &list); err != nil || code != 200 {
		t.Fatalf("%d, %v: %.300s", code, err, body)
	}
	var names []string
	for _, g := range list.Items {
		v := g.Versions[0]
		names = append(names, g.Name+" "+string(v.Freshness))
		if g.Name == "example.com" && (len(v.Resources) != 1 || v.Resources[0].ResponseKind.Group != "example.com") {
			t.Errorf("%v", v.Resources)
		}
		if g.Name == "apps" && (v.Resources[0].ResponseKind.Group != "" || // upstream omits a built-in's
			g.Versions[1].Resources[0].ResponseKind.Group != "apps") {
			t.Errorf("%v", g.Versions)
		}
	}
	if got := strings.Join(names, ", "); got != "apps Current, metrics.k8s.io Stale, example.com Current" {
		t.Error(got)
	}
}

// Only /apis without a slash has aggregated discovery.
func TestThePathWithASlashIsNotAggregated(t *testing.T) {
	const aggregated = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
	for accept, want := range map[string]int{aggregated: 406, aggregated + ",application/json": 200} {
		if code, body := get(handler(t), "GET", "/apis/", accept); code != want ||
			strings.Contains(body, `"kind":"APIGroupDiscoveryList"`) {
			t.Errorf("%s: %d %.300s", accept, code, body)
		}
	}
}

func TestBeforeTheFirstViewDiscoveryIsUnavailable(t *testing.T) {
	if code, _ := get(&Handler{}, "GET", "/apis", ""); code != 503 {
		t.Errorf("%d", code)
	}
}

// Groups of equal priority are in the order of their APIServices' names, which begin with the version.
func TestPlainGroupsAreInTheOrderOfAPIServices(t *testing.T) {
	var names []string
	for _, g := range plainGroups([]*registryv1.Group{
		{Name: "", GroupPriorityMinimum: 18000, Versions: []string{"v1"}},
		{Name: "apps", GroupPriorityMinimum: 17800, Versions: []string{"v1"}},
		{Name: "a.example.com", GroupPriorityMinimum: 1000, Versions: []string{"v2"}},
		{Name: "b.example.com", GroupPriorityMinimum: 1000, Versions: []string{"v3", "v1"}},
		{Name: "c.example.com", GroupPriorityMinimum: 1000, Versions: []string{"v1"}},
	}) {
		names = append(names, g.Name)
	}
	if got, want := strings.Join(names, " "), "apps b.example.com c.example.com a.example.com"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
}
