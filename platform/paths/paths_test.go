package paths

import (
	"net/http/httptest"
	"testing"
)

// RequestInfo parses the prefixes of the legacy API and of API groups, as kube-apiserver does.
func TestPathsAreReadAsKubeAPIServerDoes(t *testing.T) {
	for path, want := range map[string]struct {
		resource                              bool
		verb, group, namespace, of, sub, name string
	}{
		"/api/v1/namespaces/x/pods/p/log":        {true, "get", "", "x", "pods", "log", "p"},
		"/api/v1/pods?watch=true":                {true, "watch", "", "", "pods", "", ""},
		"/apis/apps/v1/namespaces/x/deployments": {true, "list", "apps", "x", "deployments", "", ""},
		"/apis/apps/v1":                          {false, "get", "", "", "", "", ""},
		"/healthz":                               {false, "get", "", "", "", "", ""},
		"/apis/example.com/v1/namespaces/x/widgets/w/status": {true, "get", "example.com", "x", "widgets",
			"status", "w"},
	} {
		info, err := RequestInfo.NewRequestInfo(httptest.NewRequest("GET", path, nil))
		if err != nil || info.IsResourceRequest != want.resource || info.Verb != want.verb ||
			info.APIGroup != want.group || info.Namespace != want.namespace || info.Resource != want.of ||
			info.Subresource != want.sub || info.Name != want.name {
			t.Errorf("%s: %+v, %v", path, info, err)
		}
	}
}
