package routing

import (
	"net/http"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/request"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/responsewriters"
)

// dialect is where kube-apiserver answers the two sorts of resources differently: requests for built-in resources pass
// its web framework (go-restful) first, which refuses in words of its own; requests for custom resources reach its CRD
// handler directly.
type dialect interface {
	// hasPath says whether the request's path is one that the resource has.
	hasPath(*registryv1.APIResource, *request.RequestInfo, *http.Request) bool
	// missingSubresource is the answer to a subresource that the resource does not have; nil where its path is one that nothing
	// serves.
	missingSubresource(*registryv1.APIResource, *request.RequestInfo) error
	// checkVerb is nil where the request's verb and, of a patch, its media type are ones that the resource takes.
	checkVerb(*requestContext) error
	// checkAccept is nil where the answer may be in what the client accepts, as far as is seen before it is negotiated.
	checkAccept(*requestContext) error
	// offersMediaType says whether objects as they are can be answered in application/subtype.
	offersMediaType(subtype string) bool
	// deprecated says whether the request counts as one for a deprecated API.
	deprecated(*requestContext) bool
}

func dialectOf(e *registryv1.APIResource) dialect {
	if e.Unstructured {
		return custom{}
	}
	return builtIn{}
}

// errUnwatchable is not nil where a watch was asked for of what can only be listed.
func (c *requestContext) errUnwatchable() error {
	if c.info.Verb == "watch" && c.req.Method == http.MethodGet && c.hasVerb("list") && !c.hasVerb("watch") {
		return apierrors.NewMethodNotSupported(c.groupResource(), c.info.Verb)
	}
	return nil
}

var patchTypes = []string{string(types.JSONPatchType), string(types.MergePatchType), string(types.ApplyYAMLPatchType)}

// builtIn is the dialect of the resources of Go's types.
type builtIn struct{}

func (builtIn) missingSubresource(*registryv1.APIResource, *request.RequestInfo) error { return nil }

// hasPath follows the routes that k8s.io/apiserver/pkg/endpoints/installer.go registers: a cluster's own objects have no
// namespace, a namespaced object has one, and what can only be created has neither lists nor names.
func (builtIn) hasPath(e *registryv1.APIResource, info *request.RequestInfo, req *http.Request) bool {
	servesAny := func(verbs ...string) bool {
		return slices.ContainsFunc(verbs, func(v string) bool { return slices.Contains(e.Verbs, v) })
	}
	switch {
	case len(e.ConnectMethods) > 0:
		// What was authorized is what the path said. There is one path to what is connected to, and it says what the
		// method does.
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
		return responsewriters.MethodNotAllowed
	}
	// Only types of Go's own can be merged strategically.
	if t := mediaType(c.req); c.info.Verb == "patch" && !slices.Contains(patchTypes, t) &&
		t != string(types.StrategicMergePatchType) {
		return responsewriters.NewFrameworkError(http.StatusUnsupportedMediaType, "Unsupported Media Type")
	}
	return nil
}

// verbRouted says whether the verb exists where it was asked for: create on a collection, update on an object.
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
	if responsewriters.Acceptable(c.req.Header.Get("Accept"), c.apiResource.MediaTypes) {
		return nil
	}
	produced := c.apiResource.MediaTypes
	if c.info.Verb == "list" || c.info.Verb == "watch" {
		produced = append(slices.Clone(produced), runtime.ContentTypeJSON+";stream=watch")
		if slices.Contains(produced, runtime.ContentTypeProtobuf) {
			produced = append(produced, runtime.ContentTypeProtobuf+";stream=watch")
		}
	}
	return responsewriters.NewNotAcceptable(produced)
}

func (builtIn) offersMediaType(string) bool { return true }

// deprecated does not count what the web framework refuses.
func (d builtIn) deprecated(c *requestContext) bool {
	return c.apiResource.Deprecation != "" && d.checkVerb(c) == nil && d.checkAccept(c) == nil
}

// custom is the dialect of custom resources
// (k8s.io/apiextensions-apiserver/pkg/apiserver/customresource_handler.go).
type custom struct{}

// missingSubresource is the CRD handler's answer where the object might be there.
func (custom) missingSubresource(main *registryv1.APIResource, info *request.RequestInfo) error {
	if !scoped(main, info) {
		return nil
	}
	return apierrors.NewNotFound(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}, info.Name)
}

// hasPath looks at the path's namespace alone.
func (custom) hasPath(e *registryv1.APIResource, info *request.RequestInfo, _ *http.Request) bool {
	return scoped(e, info)
}

func scoped(e *registryv1.APIResource, info *request.RequestInfo) bool {
	if !e.Namespaced {
		return info.Namespace == ""
	}
	return info.Namespace != "" || info.Verb == "list" || info.Verb == "watch"
}

// customVerbs are those that the handler knows; a resource that is being deleted refuses some in its own words.
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
		return apierrors.NewMethodNotSupported(c.groupResource(), c.info.Verb)
	}
	if c.info.Verb == "patch" && !slices.Contains(patchTypes, mediaType(c.req)) {
		return negotiation.NewUnsupportedMediaTypeError(patchTypes)
	}
	return nil
}

func (custom) checkAccept(*requestContext) error { return nil }

// offersMediaType leaves out protobuf and CBOR: a custom resource has no message of its own.
func (custom) offersMediaType(subtype string) bool { return subtype == "json" || subtype == "yaml" }

func (custom) deprecated(c *requestContext) bool {
	return c.apiResource.Deprecation != "" || len(c.apiResource.Warnings) > 0
}
