package responsewriters

import (
	"net/http/httptest"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// The web framework checks only media types. It ignores parameters and qualities.
func TestAcceptable(t *testing.T) {
	types := []string{"application/json", "application/yaml"}
	for accept, want := range map[string]bool{
		"": true, "*/*": true, "application/json": true, "application/json;as=Table;g=meta.k8s.io": true,
		"text/html, application/yaml;q=0.1": true,
		"*/*;q=0":                           true, "text/html": false, "application/*": false,
		"application/vnd.kubernetes.protobuf": false,
		",":                                   false,
	} {
		if got := Acceptable(accept, types); got != want {
			t.Errorf("%q: %v", accept, got)
		}
	}
}

// An error is a Status in an accepted encoding, with its code and Retry-After.
func TestErrors(t *testing.T) {
	for name, c := range map[string]struct {
		accept string
		err    error
		code   int
		has    string
	}{
		"JSON": {"", apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "a"), 404,
			`"message":"pods \"a\" not found"`},
		"YAML":        {"application/yaml", PageNotFound, 404, "reason: NotFound"},
		"protobuf":    {"application/vnd.kubernetes.protobuf", MethodNotAllowed, 405, "k8s\x00"},
		"Retry-After": {"", apierrors.NewTooManyRequests("wait", 7), 429, "wait"},
	} {
		req := httptest.NewRequest("GET", "/api/v1/pods", nil)
		req.Header.Set("Accept", c.accept)
		w := httptest.NewRecorder()
		Error(w, req, V1, c.err)
		if w.Code != c.code || !strings.Contains(w.Body.String(), c.has) {
			t.Errorf("%s: %d %q", name, w.Code, w.Body)
		}
		if name == "Retry-After" && w.Header().Get("Retry-After") != "7" {
			t.Errorf("%v", w.Header())
		}
	}
}

// Unversioned documents have no apiVersion.
func TestWriteUnversioned(t *testing.T) {
	for accept, code := range map[string]int{"": 200, "application/yaml": 200, "text/html": 406} {
		req := httptest.NewRequest("GET", "/api", nil)
		req.Header.Set("Accept", accept)
		w := httptest.NewRecorder()
		WriteUnversioned(w, req, &metav1.APIVersions{
			TypeMeta: metav1.TypeMeta{Kind: "APIVersions"},
			Versions: []string{"v1"},
		})
		if w.Code != code || code == 200 && strings.Contains(w.Body.String(), "apiVersion\"") {
			t.Errorf("%q: %d %s", accept, w.Code, w.Body)
		}
	}
}
