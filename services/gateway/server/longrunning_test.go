package server

import (
	"net/http/httptest"
	"testing"

	"watershed.dev/platform/paths"
)

// Watches, proxies and streams are exempt from --request-timeout and flow control's seats, as in kube-apiserver.
func TestLongRunningRequestsAreKubeAPIServers(t *testing.T) {
	for path, want := range map[string]bool{
		"/api/v1/pods?watch=1":                              true,
		"/api/v1/watch/pods":                                true,
		"/api/v1/namespaces/x/pods/p/proxy/a":               true,
		"/api/v1/namespaces/x/pods/p/attach":                true,
		"/api/v1/namespaces/x/pods/p/exec":                  true,
		"/api/v1/namespaces/x/pods/p/log":                   true,
		"/api/v1/namespaces/x/pods/p/portforward":           true,
		"/api/v1/nodes/n/proxy":                             true,
		"/api/v1/namespaces/x/pods":                         false,
		"/api/v1/namespaces/x/pods/p":                       false,
		"/api/v1/namespaces/x/pods/p/status":                false,
		"/apis/apps/v1/namespaces/x/deployments/d?watch=no": false,
		"/healthz": false,
	} {
		req := httptest.NewRequest("GET", path, nil)
		info, err := paths.RequestInfo.NewRequestInfo(req)
		if err != nil {
			t.Fatal(err)
		}
		if got := LongRunning(req, info); got != want {
			t.Errorf("%s: %v, want %v", path, got, want)
		}
	}
}
