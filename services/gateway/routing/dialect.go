package routing

import (
	"net/http"
	"slices"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/responsewriters"
)

// dialect is the difference between kube-apiserver's responses for built-in and custom resources. Its web framework
// (go-restful) rejects a request for a built-in resource first, with texts of its own. A request for a custom resource
// reaches its CRD handler directly.
type dialect interface {
	// hasPath reports whether the resource has the request's path.
	hasPath(*registryv1.APIResource, *request.RequestInfo, *http.Request) bool
	// missingSubresource returns the error for a subresource that does not exist. It returns nil if no server handles
	// the path.
	missingSubresource(*registryv1.APIResource, *request.RequestInfo) error
	// checkVerb returns an error if the resource does not support the request's verb or, for a patch, its media type.
	checkVerb(*requestContext) error
	// checkAccept returns an error if the Accept header rules out a response before negotiation.
	checkAccept(*requestContext) error
	// offersMediaType reports whether unconverted objects are served as application/subtype.
	offersMediaType(subtype string) bool
	// deprecated reports whether the request counts as a request for a deprecated API.
	deprecated(*requestContext) bool
	// metricsLabels returns the verb and the scope with which upstream counts the request.
	metricsLabels(*requestContext) (verb, scope string)
}

func dialectOf(e *registryv1.APIResource) dialect {
	if e.Unstructured {
		return custom{}
	}
	return builtIn{}
}

// reject marks a request that upstream rejects with err before its handler, and so does not count in metrics.
func (c *requestContext) reject(err error) error {
	c.rejected = true
	return err
}

// errUnwatchable returns an error for a watch of a resource that only supports list.
func (c *requestContext) errUnwatchable() error {
	if c.info.Verb == "watch" && c.req.Method == http.MethodGet && c.hasVerb("list") && !c.hasVerb("watch") {
		return apierrors.NewMethodNotSupported(c.groupResource(), c.info.Verb)
	}
	return nil
}

// patchTypes returns the media types of patches that need no Go type.
func patchTypes() []string {
	all := []string{string(types.JSONPatchType), string(types.MergePatchType), string(types.ApplyYAMLPatchType)}
	if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
		all = append(all, string(types.ApplyCBORPatchType))
	}
	return all
}

// builtIn is the dialect of the resources with Go types.
type builtIn struct{}

func (builtIn) missingSubresource(*registryv1.APIResource, *request.RequestInfo) error { return nil }

// hasPath follows the routes that k8s.io/apiserver/pkg/endpoints/installer.go registers. A cluster-scoped object has no
// namespace, and a namespaced object has a namespace. A create-only resource has no lists and no named objects.
func (builtIn) hasPath(e *registryv1.APIResource, info *request.RequestInfo, req *http.Request) bool {
	servesAny := func(verbs ...string) bool {
		return slices.ContainsFunc(verbs, func(v string) bool { return slices.Contains(e.Verbs, v) })
	}
	if len(info.Parts) > 3 && !e.ConnectSubpath { // nothing follows a subresource
		return false
	}
	switch {
	case len(e.ConnectMethods) > 0:
		// The authorizer has seen only the path. So a connect request must use the single canonical path of its object,
		// and the verb must be the method's.
		if info.Name == "" || watchPath(req) || len(info.Parts) < 2 || info.Parts[1] != info.Name ||
			info.Verb != methodVerbs[req.Method] {
			return false
		}
	case info.Name != "" && info.Subresource == "" && !servesAny("get", "update", "patch", "delete"),
		e.Namespaced && info.Namespace == "" && info.Name == "" && !servesAny("list", "watch"),
		watchPath(req) && !servesAny("watch"):
		return false
	}
	if info.Resource == "namespaces" && info.APIGroup == "" {
		return true
	}
	if !e.Namespaced {
		return info.Namespace == ""
	}
	if info.Namespace == "" {
		return info.Name == "" || info.Verb == "watch" || info.Verb == "list"
	}
	return true
}

func (d builtIn) checkVerb(c *requestContext) error {
	if err := c.errUnwatchable(); err != nil {
		return err
	}
	if c.req.Method == http.MethodHead || !d.verbRouted(c) {
		return c.reject(responsewriters.MethodNotAllowed)
	}
	// A strategic merge patch needs a Go type.
	if c.info.Verb == "patch" && !hasPatchType(c.req.Header.Get("Content-Type")) {
		return c.reject(responsewriters.NewFrameworkError(http.StatusUnsupportedMediaType, "Unsupported Media Type"))
	}
	return nil
}

// hasPatchType reports whether a part of a Content-Type is a type of a patch. go-restful splits the header at commas to
// find the route (github.com/emicklei/go-restful/v3, matchesContentType), and registry rejects several parts.
func hasPatchType(contentType string) bool {
	for part := range strings.SplitSeq(contentType, ",") {
		t := withoutParameters(part)
		if t == string(types.StrategicMergePatchType) || slices.Contains(patchTypes(), t) {
			return true
		}
	}
	return false
}

// verbRouted reports whether the path supports the verb: create on a collection, update on an object.
func (builtIn) verbRouted(c *requestContext) bool {
	named, scoped := c.info.Name != "", c.info.Namespace != "" || !c.apiResource.Namespaced
	if watchPath(c.req) && c.req.Method != http.MethodGet || !c.hasVerb(c.info.Verb) {
		return false
	}
	switch c.info.Verb {
	case "get", "update", "patch", "delete":
		return named
	case "create":
		return scoped && (!named || c.apiResource.Resource.Subresource != "")
	case "deletecollection":
		return scoped && !named
	}
	return true
}

func (builtIn) checkAccept(c *requestContext) error {
	accept, produced := c.req.Header.Get("Accept"), c.apiResource.MediaTypes
	if isPodLog(c.info) {
		// The route accepts text/plain, and the handler then rejects it (pkg/registry/core/pod/rest, LogREST).
		produced = append([]string{"text/plain"}, produced...)
	}
	if responsewriters.Acceptable(accept, produced) {
		return nil
	}
	if c.info.Verb == "list" || c.info.Verb == "watch" {
		produced = append(slices.Clone(produced), c.streamMediaTypes()...)
		if responsewriters.Acceptable(accept, produced) { // application/cbor-seq
			return nil
		}
	}
	return c.reject(responsewriters.NewNotAcceptable(produced))
}

func (builtIn) offersMediaType(string) bool { return true }

// deprecated ignores requests that the web framework rejects.
func (d builtIn) deprecated(c *requestContext) bool {
	return c.apiResource.Deprecation != "" && d.checkVerb(c) == nil && d.checkAccept(c) == nil
}

// metricsLabels follows the routes of k8s.io/apiserver/pkg/endpoints/installer.go. The scope is the path's, also if a
// selector names an object. A watch uses the route of a list, unless its path is the old form. A pod's log has the verb
// of its storage (OverrideMetricsVerb).
func (builtIn) metricsLabels(c *requestContext) (verb, scope string) {
	verb, scope = strings.ToUpper(c.info.Verb), "cluster"
	switch {
	case len(c.apiResource.ConnectMethods) > 0, isPodLog(c.info):
		verb = "CONNECT"
	case c.info.Verb == "watch" && !watchPath(c.req):
		verb = "LIST"
	}
	switch {
	case len(c.info.Parts) > 1 || c.info.Verb == "create":
		scope = "resource"
	case c.namespace() != "":
		scope = "namespace"
	}
	return verb, scope
}

// isPodLog reports whether a request reads the log of a pod.
func isPodLog(info *request.RequestInfo) bool {
	return info.Verb == "get" && info.APIGroup == "" && info.Resource == "pods" && info.Subresource == "log"
}

// custom is the dialect of custom resources
// (k8s.io/apiextensions-apiserver/pkg/apiserver/customresource_handler.go).
type custom struct{}

// missingSubresource returns the CRD handler's error if the path could name an object.
func (custom) missingSubresource(main *registryv1.APIResource, info *request.RequestInfo) error {
	if !scoped(main, info) {
		return nil
	}
	return apierrors.NewNotFound(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}, info.Name)
}

// hasPath checks only the path's namespace.
func (custom) hasPath(e *registryv1.APIResource, info *request.RequestInfo, _ *http.Request) bool {
	return scoped(e, info)
}

func scoped(e *registryv1.APIResource, info *request.RequestInfo) bool {
	if !e.Namespaced {
		return info.Namespace == ""
	}
	return info.Namespace != "" || info.Verb == "list" || info.Verb == "watch"
}

// customVerbs are the verbs of the CRD handler. A resource that is being deleted rejects some of them with its own
// error.
var customVerbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}

func (custom) checkVerb(c *requestContext) error {
	if err := c.errUnwatchable(); err != nil {
		return err
	}
	supported := slices.Contains(customVerbs, c.info.Verb)
	if c.apiResource.Resource.Subresource != "" {
		supported = c.hasVerb(c.info.Verb)
	}
	if !supported {
		return c.reject(apierrors.NewMethodNotSupported(c.groupResource(), c.info.Verb))
	}
	if c.info.Verb == "patch" && !slices.Contains(patchTypes(), mediaType(c.req)) {
		return negotiation.NewUnsupportedMediaTypeError(patchTypes())
	}
	return nil
}

func (custom) checkAccept(*requestContext) error { return nil }

// offersMediaType excludes protobuf, because a custom resource has no protobuf message.
func (custom) offersMediaType(subtype string) bool { return subtype != "vnd.kubernetes.protobuf" }

func (custom) deprecated(c *requestContext) bool {
	return c.apiResource.Deprecation != "" || len(c.apiResource.Warnings) > 0
}

// metricsLabels takes the scope from RequestInfo, in which a selector may set the name.
func (custom) metricsLabels(c *requestContext) (verb, scope string) {
	return strings.ToUpper(c.info.Verb), metrics.CleanScope(c.info)
}
