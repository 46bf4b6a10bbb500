package routing

import (
	"net/http"
	"strings"
)

// watchPath reports whether the path is the old form of a watch, /api/v1/watch/….
func watchPath(req *http.Request) bool {
	parts := strings.SplitN(strings.TrimPrefix(req.URL.Path, "/"), "/", 5)
	switch {
	case len(parts) > 3 && parts[0] == "api":
		return parts[2] == "watch"
	case len(parts) > 4 && parts[0] == "apis":
		return parts[3] == "watch"
	}
	return false
}

// methodVerbs maps methods to the verbs that RequestInfo sets for a path with a name.
var methodVerbs = map[string]string{
	http.MethodPost:    "create",
	http.MethodGet:     "get",
	http.MethodHead:    "get",
	http.MethodPut:     "update",
	http.MethodPatch:   "patch",
	http.MethodDelete:  "delete",
	http.MethodOptions: "",
}

// namespace returns the request's namespace. It is empty for a cluster-scoped resource, although RequestInfo sets the
// namespace of a Namespace object to its name.
func (c *requestContext) namespace() string {
	if !c.apiResource.Namespaced {
		return ""
	}
	return c.info.Namespace
}

// subpath returns the path after the subresource, as kube-apiserver parses it.
func (c *requestContext) subpath() string {
	const before = 3 // resource, name, subresource
	p := ""
	if len(c.info.Parts) > before {
		p = "/" + strings.TrimPrefix(strings.Join(c.info.Parts[before:], "/"), "/")
	}
	if strings.HasSuffix(c.info.Path, "/") && !strings.HasSuffix(p, "/") {
		p += "/"
	}
	return p
}
