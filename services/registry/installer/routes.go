package installer

import (
	"reflect"
	"strings"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/kube-openapi/pkg/common"

	"watershed.dev/services/registry/handlers"
)

// container holds the routes of a group version. It implements common.RouteContainer.
type container struct {
	root   string
	routes []common.Route
}

func (c *container) RootPath() string                   { return c.root }
func (c *container) PathParameters() []common.Parameter { return nil }
func (c *container) Routes() []common.Route             { return c.routes }

type route struct {
	method, path, operation, doc string
	params                       []common.Parameter
	consumes, produces           []string
	gvk                          metav1.GroupVersionKind
	action                       string
	reads, writes                any
	responses                    []common.StatusCodeResponse
}

func (r *route) Method() string                                   { return r.method }
func (r *route) Path() string                                     { return r.path }
func (r *route) OperationName() string                            { return r.operation }
func (r *route) Parameters() []common.Parameter                   { return r.params }
func (r *route) Description() string                              { return r.doc }
func (r *route) Consumes() []string                               { return r.consumes }
func (r *route) Produces() []string                               { return r.produces }
func (r *route) RequestPayloadSample() any                        { return r.reads }
func (r *route) ResponsePayloadSample() any                       { return r.writes }
func (r *route) StatusCodeResponses() []common.StatusCodeResponse { return r.responses }
func (r *route) Metadata() map[string]any {
	if r.action == "" {
		return nil
	}
	return map[string]any{genericapi.RouteMetaGVK: r.gvk, genericapi.RouteMetaAction: r.action}
}

type response struct {
	code    int
	message string
	model   any
}

func (r response) Code() int       { return r.code }
func (r response) Message() string { return r.message }
func (r response) Model() any      { return r.model }

type parameter struct {
	name, description, dataType string
	kind                        common.ParameterKind
	required                    bool
}

func (p parameter) Name() string               { return p.name }
func (p parameter) Description() string        { return p.description }
func (p parameter) Required() bool             { return p.required }
func (p parameter) Kind() common.ParameterKind { return p.kind }
func (p parameter) DataType() string           { return p.dataType }
func (p parameter) AllowMultiple() bool        { return false }

// routesOf returns the operations of a group version. Their order and names are upstream's
// (k8s.io/apiserver/pkg/endpoints/installer.go), because generated clients depend on them.
func routesOf(gv schema.GroupVersion, scopes []*handlers.RequestScope) *container {
	c := &container{root: RootPath(gv)}
	types := []string{"application/json", "application/yaml", "application/vnd.kubernetes.protobuf"}
	list := metav1.APIResourceList{}
	c.routes = append(c.routes, &route{
		method:    "GET",
		path:      c.root + "/",
		operation: "getAPIResources",
		doc:       "get available resources",
		consumes:  types,
		produces:  types,
		writes:    list,
		responses: responses(list, 200),
	})
	parents := map[string]string{}
	for _, scope := range scopes {
		if scope.Resource.GroupVersion() == gv && scope.Subresource == "" {
			parents[scope.Resource.Resource] = scope.Kind.Kind
		}
	}
	for _, scope := range scopes {
		if scope.Resource.GroupVersion() == gv {
			w := &routeWriter{container: c, scope: scope, parent: parents[scope.Resource.Resource]}
			w.write()
		}
	}
	return c
}

type routeWriter struct {
	*container
	scope  *handlers.RequestScope
	parent string
}

var pretty = parameter{
	name:     "pretty",
	dataType: "string",
	kind:     common.QueryParameterKind,
	description: "If 'true', then the output is pretty printed. Defaults to 'false' unless the user-agent indicates " +
		"a browser or command-line HTTP tool (curl and wget).",
}

func (w *routeWriter) write() {
	rs := w.scope
	name := pathParameter("name", "name of the "+rs.Kind.Kind)
	namespace := pathParameter("namespace", "object name and auth scope, such as for teams and projects")
	base, scope := "/"+rs.Resource.Resource, []common.Parameter{}
	if rs.Namespaced {
		base, scope = "/namespaces/{namespace}"+base, []common.Parameter{namespace}
	}
	item, collection := base+"/{name}", base
	itemParams := append([]common.Parameter{name}, scope...)
	collectionParams := scope
	if rs.Subresource != "" {
		item += "/" + rs.Subresource
		collection, collectionParams = item, itemParams
	}
	if _, ok := rs.Storage.(rest.Connecter); ok {
		w.connect(item, itemParams, "")
		if rs.APIResource.ConnectSubpath {
			w.connect(item+"/{path}",
				append([]common.Parameter{pathParameter("path", "path to the resource")}, itemParams...), "WithPath")
		}
		return
	}
	has := rs.HasVerb
	if has("list") {
		w.list(collection, collectionParams, false)
	}
	if has("create") {
		w.post(collection, collectionParams)
	}
	if has("deletecollection") {
		w.remove(collection, collectionParams, true)
	}
	if has("list") && has("watch") {
		w.watch("/watch"+collection, collectionParams, false, true)
	}
	if has("get") {
		w.get(item, itemParams)
	}
	if has("update") {
		w.replace(item, itemParams)
	}
	if has("patch") {
		w.patch(item, itemParams)
	}
	if has("delete") {
		w.remove(item, itemParams, false)
	}
	if has("watch") {
		w.watch("/watch"+item, itemParams, false, false)
	}
	if rs.Namespaced && rs.Subresource == "" {
		if has("list") {
			w.list("/"+rs.Resource.Resource, nil, true)
		}
		if has("list") && has("watch") {
			w.watch("/watch/"+rs.Resource.Resource, nil, true, true)
		}
	}
}

// pathParameter returns a required parameter of a path.
func pathParameter(name, description string) parameter {
	return parameter{
		name:        name,
		description: description,
		dataType:    "string",
		kind:        common.PathParameterKind,
		required:    true,
	}
}

// operation returns an operation's name: verb, scope, kind, subresource and suffix.
func (w *routeWriter) operation(verb string, all bool, suffix string) string {
	namespaced := ""
	if w.scope.Namespaced && !all {
		namespaced = "Namespaced"
	}
	if all {
		suffix += "ForAllNamespaces"
	}
	kind := w.scope.Kind.Kind
	if w.scope.Subresource != "" {
		kind = w.parent
	}
	return verb + namespaced + kind + cases.Title(language.English).String(w.scope.Subresource) + suffix
}

// doc returns an operation's description. It replaces % in ofSub with the subresource.
func (w *routeWriter) doc(plain, ofSub string) string {
	if w.scope.Subresource == "" {
		return plain + w.scope.Kind.Kind
	}
	return strings.ReplaceAll(ofSub, "%", w.scope.Subresource) + w.parent
}

func (w *routeWriter) add(action string, r *route) {
	r.path = w.root + r.path
	r.action = action
	r.gvk = metav1.GroupVersionKind{Group: w.scope.Kind.Group, Version: w.scope.Kind.Version, Kind: w.scope.Kind.Kind}
	if r.consumes == nil {
		r.consumes = []string{"*/*"}
	}
	w.routes = append(w.routes, r)
}

func (w *routeWriter) mediaTypes(stream bool) []string {
	var all, streams []string
	for _, m := range w.scope.Serializer.SupportedMediaTypes() {
		all = append(all, m.MediaType)
		if m.StreamSerializer != nil {
			streams = append(streams, m.MediaType+";stream=watch")
		}
	}
	if stream {
		return append(all, streams...)
	}
	return all
}

// sample returns an empty object of a kind, by value, as the OpenAPI builder requires.
func (w *routeWriter) sample(kind schema.GroupVersionKind) any {
	obj, err := w.scope.Creater.New(kind)
	if err != nil {
		return nil
	}
	return reflect.Indirect(reflect.ValueOf(obj)).Interface()
}

func (w *routeWriter) object(verb string) any {
	if m, ok := w.scope.Storage.(rest.StorageMetadata); ok {
		if o := m.ProducesObject(verb); o != nil {
			return o
		}
	}
	return w.sample(w.scope.Kind)
}

func (w *routeWriter) produces(verb string, stream bool) []string {
	types := w.mediaTypes(stream)
	if m, ok := w.scope.Storage.(rest.StorageMetadata); ok {
		return append(append([]string{}, m.ProducesMIMETypes(verb)...), types...)
	}
	return types
}

func responses(model any, codes ...int) []common.StatusCodeResponse {
	text := map[int]string{200: "OK", 201: "Created", 202: "Accepted"}
	var all []common.StatusCodeResponse
	for _, c := range codes {
		all = append(all, response{c, text[c], model})
	}
	return all
}

// body returns the parameter of a request's payload.
func body(required bool) parameter {
	return parameter{
		name:     "body",
		dataType: "string",
		kind:     common.BodyParameterKind,
		required: required,
	}
}
