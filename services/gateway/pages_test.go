package gateway

import (
	"net/http"
	"net/http/httptest"
	"testing"
)

// A page is served by its decoded path, without a redirect, as kube-apiserver's pages are.
func TestPathsOfPages(t *testing.T) {
	pages := http.NewServeMux()
	ok := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusOK) }
	for _, pattern := range []string{"/", "/version", "/version/{$}", "/openapi/"} {
		pages.HandleFunc(pattern, ok)
	}
	for path, want := range map[string]int{
		"/":                     http.StatusOK,
		"/version":              http.StatusOK,
		"/version/":             http.StatusOK,
		"/openapi%2Fv2":         http.StatusOK,
		"/openapi/v3/apis/a%2F": http.StatusOK,
		"/openapi/../x":         http.StatusNotFound,
		"/openapi/%2e%2e/x":     http.StatusNotFound,
		"/openapi/./v2":         http.StatusNotFound,
		"//openapi/v2":          http.StatusNotFound,
		"/version//":            http.StatusNotFound,
		"//":                    http.StatusNotFound,
	} {
		w := httptest.NewRecorder()
		servePage(pages, w, httptest.NewRequest("GET", "https://x"+path, nil))
		if w.Code != want {
			t.Errorf("%s: %d, want %d", path, w.Code, want)
		}
	}
}
