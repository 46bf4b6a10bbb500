package apis

import (
	"crypto/sha256"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"

	"golang.org/x/text/cases"
	"golang.org/x/text/language"
	apiextensionsapiserver "k8s.io/apiextensions-apiserver/pkg/apiserver"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	genericapi "k8s.io/apiserver/pkg/endpoints"
	apiopenapi "k8s.io/apiserver/pkg/endpoints/openapi"
	"k8s.io/apiserver/pkg/registry/rest"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilopenapi "k8s.io/apiserver/pkg/util/openapi"
	"k8s.io/component-base/version"
	aggregatorscheme "k8s.io/kube-aggregator/pkg/apiserver/scheme"
	aggregatoropenapi "k8s.io/kube-aggregator/pkg/generated/openapi"
	"k8s.io/kube-openapi/pkg/builder"
	"k8s.io/kube-openapi/pkg/builder3"
	"k8s.io/kube-openapi/pkg/common"
	"k8s.io/kube-openapi/pkg/handler"
	openapiutil "k8s.io/kube-openapi/pkg/util"
	"k8s.io/kube-openapi/pkg/validation/spec"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	generatedopenapi "k8s.io/kubernetes/pkg/generated/openapi"

	"watershed.dev/services/registry/verbs"
)

// documents makes OpenAPI out of the endpoints, when somebody asks: the definitions take tens of megabytes and few
// clients read them.
type documents struct {
	groups []genericapiserver.APIGroupInfo
	etag   string
	v3     *common.OpenAPIV3Config
	v2     *common.Config

	mu   sync.Mutex
	made map[string]any
}

func definitionsOf(ref common.ReferenceCallback) map[string]common.OpenAPIDefinition {
	all := generatedopenapi.GetOpenAPIDefinitions(ref)
	for k, v := range aggregatoropenapi.GetOpenAPIDefinitions(ref) {
		all[k] = v
	}
	return all
}

func newDocuments(groups []genericapiserver.APIGroupInfo) (*documents, error) {
	namer := apiopenapi.NewDefinitionNamer(legacyscheme.Scheme, apiextensionsapiserver.Scheme, aggregatorscheme.Scheme)
	get := utilopenapi.GetOpenAPIDefinitionsWithoutDisabledFeatures(definitionsOf)
	d := &documents{
		groups: groups,
		made:   map[string]any{},
		v3:     genericapiserver.DefaultOpenAPIV3Config(get, namer),
		v2:     genericapiserver.DefaultOpenAPIConfig(get, namer),
	}
	// upstream sets it, for go-restful's routes; it must not be set for ours
	d.v2.GetOperationIDAndTags, d.v3.GetOperationIDAndTags = nil, nil //nolint:staticcheck
	d.v2.GetOperationIDAndTagsFromRoute, d.v3.GetOperationIDAndTagsFromRoute = operationID, operationID
	d.v2.Info.Title, d.v3.Info.Title = "Kubernetes", "Kubernetes"
	d.v2.Info.Version, d.v3.Info.Version = version.Get().GitVersion, version.Get().GitVersion
	bearer := &spec.SecurityScheme{SecuritySchemeProps: spec.SecuritySchemeProps{
		Type:        "apiKey",
		Name:        "authorization",
		In:          "header",
		Description: "Bearer Token authentication",
	}}
	d.v2.SecurityDefinitions = &spec.SecurityDefinitions{"BearerToken": bearer}
	d.v2.DefaultSecurity = []map[string][]string{{"BearerToken": {}}}
	h := sha256.New()
	fmt.Fprint(h, version.Get().GitVersion)
	for _, g := range groups {
		for v, resources := range g.VersionedResourcesStorageMap {
			fmt.Fprint(h, g.PrioritizedVersions[0].Group, v, len(resources))
		}
	}
	d.etag = fmt.Sprintf("%X", h.Sum(nil)[:16])
	return d, nil
}

// idVerbs begin an operation's name.
var idVerbs = []string{"get", "log", "read", "replace", "patch", "delete", "watch", "connect",
	"proxy", "list", "create"}

// operationID puts the group and version behind the verb, as k8s.io/apiserver/pkg/endpoints/openapi does, so that
// generated clients name their methods alike.
func operationID(r common.Route) (string, []string, error) {
	for _, verb := range idVerbs {
		rest, ok := strings.CutPrefix(r.OperationName(), verb)
		if !ok {
			continue
		}
		parts := strings.Split(strings.Trim(r.Path(), "/"), "/")
		if parts[0] == "api" {
			parts = append([]string{"apis", "core"}, parts[1:]...)
		}
		group, version := strings.TrimSuffix(parts[1], ".k8s.io"), parts[2]
		id := verb + apiopenapi.ToValidOperationID(group, true) + apiopenapi.ToValidOperationID(version, true) +
			apiopenapi.ToValidOperationID(rest, true)
		return id, []string{apiopenapi.ToValidOperationID(group, false) + "_" +
			apiopenapi.ToValidOperationID(version, false)}, nil
	}
	return "", nil, fmt.Errorf("operation names begin with a verb: %q", r.OperationName())
}

// resourceModels are the schemas that server-side apply merges by, of a group's resources, or of every group's.
func (d *documents) resourceModels(group string) (map[string]*spec.Schema, error) {
	var names []string
	for i := range d.groups {
		info := &d.groups[i]
		for _, gv := range info.PrioritizedVersions {
			if group != "*" && group != gv.Group {
				continue
			}
			for _, st := range info.VersionedResourcesStorageMap[gv.Version] {
				kind, err := genericapi.GetResourceKind(gv, st, info.Scheme)
				if err != nil {
					return nil, err
				}
				sample, err := info.Scheme.New(kind)
				if err != nil {
					return nil, err
				}
				names = append(names, openapiutil.GetCanonicalTypeName(sample))
			}
		}
	}
	return builder3.BuildOpenAPIDefinitionsForResources(d.v3, names...)
}

func (d *documents) get(path string, endpoints []*verbs.Endpoint) (any, bool, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if doc, ok := d.made[path]; ok {
		return doc, true, nil
	}
	var doc any
	var err error
	if path == "v2" {
		var all []common.RouteContainer
		for _, gv := range versionsOf(endpoints) {
			all = append(all, routesOf(gv, endpoints))
		}
		var swagger *spec.Swagger
		if swagger, err = builder.BuildOpenAPISpecFromRoutes(all, d.v2); err == nil {
			// kubectl's older versions stumble over them
			swagger.Definitions = handler.PruneDefaults(swagger.Definitions)
			doc = swagger
		}
	} else {
		root := "/" + strings.TrimPrefix(path, "v3/")
		for _, gv := range versionsOf(endpoints) {
			if RootPath(gv) == root {
				doc, err = builder3.BuildOpenAPISpecFromRoutes([]common.RouteContainer{routesOf(gv, endpoints)}, d.v3)
			}
		}
	}
	if err != nil || doc == nil {
		return nil, false, err
	}
	d.made[path] = doc
	return doc, true, nil
}

// RootPath is where a group version is served: /api/v1, or /apis/ and its group and version.
func RootPath(gv schema.GroupVersion) string {
	if gv.Group == "" {
		return "/api/" + gv.Version
	}
	return "/apis/" + gv.String()
}

func versionsOf(endpoints []*verbs.Endpoint) []schema.GroupVersion {
	var all []schema.GroupVersion
	seen := map[schema.GroupVersion]bool{}
	for _, e := range endpoints {
		if gv := e.Resource.GroupVersion(); !seen[gv] {
			seen[gv] = true
			all = append(all, gv)
		}
	}
	return all
}

// container is one group version's routes. It implements common.RouteContainer.
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

// routesOf writes down the operations of one group version, in the order and with the names of upstream's installer
// (k8s.io/apiserver/pkg/endpoints/installer.go), which generated clients depend on.
func routesOf(gv schema.GroupVersion, endpoints []*verbs.Endpoint) *container {
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
	for _, e := range endpoints {
		if e.Resource.GroupVersion() == gv && e.Subresource == "" {
			parents[e.Resource.Resource] = e.Kind.Kind
		}
	}
	for _, e := range endpoints {
		if e.Resource.GroupVersion() == gv {
			w := &routeWriter{container: c, e: e, parent: parents[e.Resource.Resource]}
			w.write()
		}
	}
	return c
}

type routeWriter struct {
	*container
	e      *verbs.Endpoint
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
	e := w.e
	name := parameter{
		name:        "name",
		description: "name of the " + e.Kind.Kind,
		dataType:    "string",
		kind:        common.PathParameterKind,
		required:    true,
	}
	namespace := parameter{
		name:        "namespace",
		description: "object name and auth scope, such as for teams and projects",
		dataType:    "string",
		kind:        common.PathParameterKind,
		required:    true,
	}
	path := parameter{
		name:        "path",
		description: "path to the resource",
		dataType:    "string",
		kind:        common.PathParameterKind,
		required:    true,
	}
	base, scope := "/"+e.Resource.Resource, []common.Parameter{}
	if e.Namespaced {
		base, scope = "/namespaces/{namespace}"+base, []common.Parameter{namespace}
	}
	item, collection := base+"/{name}", base
	itemParams := append([]common.Parameter{name}, scope...)
	collectionParams := scope
	if e.Subresource != "" {
		item += "/" + e.Subresource
		collection, collectionParams = item, itemParams
	}
	has := func(verb string) bool { return e.Offers(verb) }
	_, connecter := e.Storage.(rest.Connecter)
	if connecter {
		has = func(string) bool { return false }
	}
	if has("list") {
		w.list(collection, collectionParams, false)
	}
	if has("create") {
		w.post(collection, collectionParams)
	}
	if has("deletecollection") {
		w.remove("DELETE", collection, collectionParams, true)
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
		w.remove("DELETE", item, itemParams, false)
	}
	if has("watch") {
		w.watch("/watch"+item, itemParams, false, false)
	}
	if connecter {
		w.connect(item, itemParams, "")
		if e.Entry.ConnectSubpath {
			w.connect(item+"/{path}", append([]common.Parameter{path}, itemParams...), "WithPath")
		}
	}
	if e.Namespaced && e.Subresource == "" {
		if has("list") {
			w.list("/"+e.Resource.Resource, nil, true)
		}
		if has("list") && has("watch") {
			w.watch("/watch/"+e.Resource.Resource, nil, true, true)
		}
	}
}

// operation is an operation's name: verb, scope, kind, subresource and suffix.
func (w *routeWriter) operation(verb string, all bool, suffix string) string {
	namespaced := ""
	if w.e.Namespaced && !all {
		namespaced = "Namespaced"
	}
	if all {
		suffix += "ForAllNamespaces"
	}
	kind := w.e.Kind.Kind
	if w.e.Subresource != "" {
		kind = w.parent
	}
	return verb + namespaced + kind + cases.Title(language.English).String(w.e.Subresource) + suffix
}

// doc is an operation's description.
func (w *routeWriter) doc(plain, ofSub string) string {
	if w.e.Subresource == "" {
		return plain + w.e.Kind.Kind
	}
	return strings.ReplaceAll(ofSub, "%", w.e.Subresource) + w.parent
}

func (w *routeWriter) add(action string, r *route) {
	r.path = w.root + r.path
	r.action = action
	r.gvk = metav1.GroupVersionKind{Group: w.e.Kind.Group, Version: w.e.Kind.Version, Kind: w.e.Kind.Kind}
	if r.consumes == nil {
		r.consumes = []string{"*/*"}
	}
	w.routes = append(w.routes, r)
}

func (w *routeWriter) mediaTypes(stream bool) []string {
	var all, streams []string
	for _, m := range w.e.Serializer.SupportedMediaTypes() {
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

// sample is an empty object of a kind, by value, as the OpenAPI builder wants it.
func (w *routeWriter) sample(kind schema.GroupVersionKind) any {
	obj, err := w.e.Creater.New(kind)
	if err != nil {
		return nil
	}
	return reflect.Indirect(reflect.ValueOf(obj)).Interface()
}

func (w *routeWriter) object(verb string) any {
	if m, ok := w.e.Storage.(rest.StorageMetadata); ok {
		if o := m.ProducesObject(verb); o != nil {
			return o
		}
	}
	return w.sample(w.e.Kind)
}

func (w *routeWriter) produces(verb string, stream bool) []string {
	types := w.mediaTypes(stream)
	if m, ok := w.e.Storage.(rest.StorageMetadata); ok {
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

// body is the parameter of a request's payload.
func body(required bool) parameter {
	return parameter{
		name:     "body",
		dataType: "string",
		kind:     common.BodyParameterKind,
		required: required,
	}
}

func (w *routeWriter) get(path string, params []common.Parameter) {
	o := w.object("GET")
	all := append([]common.Parameter{pretty}, params...)
	if g, ok := w.e.Storage.(rest.GetterWithOptions); ok {
		opts, _, _ := g.NewGetOptions()
		all = append(all, w.versionedOptions(opts)...)
	}
	w.add("get", &route{
		method:    "GET",
		path:      path,
		operation: w.operation("read", false, ""),
		doc:       w.doc("read the specified ", "read % of the specified "),
		params:    all,
		produces:  w.produces("GET", false),
		writes:    o,
		responses: responses(o, 200),
	})
}

// versionedOptions are the parameters of an internal options type in the version that is served.
func (w *routeWriter) versionedOptions(internal any) []common.Parameter {
	if _, ok := internal.(interface{ GetObjectKind() schema.ObjectKind }); !ok || reflect.ValueOf(internal).IsNil() {
		return nil
	}
	name := reflect.Indirect(reflect.ValueOf(internal)).Type().Name()
	versioned, err := w.e.Creater.New(w.e.Kind.GroupVersion().WithKind(name))
	if err != nil {
		if versioned, err = w.e.Creater.New(w.e.Resource.GroupVersion().WithKind(name)); err != nil {
			return nil
		}
	}
	return parameters(versioned)
}

func (w *routeWriter) list(path string, params []common.Parameter, all bool) {
	lister, _ := w.e.Storage.(rest.Lister)
	kinds, _, err := w.e.Typer.ObjectKinds(lister.NewList())
	if err != nil {
		return
	}
	list := w.sample(w.e.Resource.GroupVersion().WithKind(kinds[0].Kind))
	doc := "list objects of kind "
	if w.e.Offers("watch") {
		doc = "list or watch objects of kind "
	}
	w.add("list", &route{
		method:    "GET",
		path:      path,
		operation: w.operation("list", all, ""),
		doc:       doc + w.e.Kind.Kind,
		params:    concat([]common.Parameter{pretty}, parameters(&metav1.ListOptions{}), params),
		produces:  w.produces("LIST", true),
		writes:    list,
		responses: responses(list, 200),
	})
}

func (w *routeWriter) watch(path string, params []common.Parameter, all, list bool) {
	event := metav1.WatchEvent{}
	suffix, doc, action := "", w.doc("watch changes to an object of kind ", "watch changes to % of an object of kind ")+
		". deprecated: use the 'watch' parameter with a list operation instead, filtered to a single item with the "+
		"'fieldSelector' parameter.", "watch"
	if list {
		suffix, action = "List", "watchlist"
		doc = w.doc("watch individual changes to a list of ", "watch individual changes to a list of % of ") +
			". deprecated: use the 'watch' parameter with a list operation instead."
	}
	w.add(action, &route{
		method:    "GET",
		path:      path,
		operation: w.operation("watch", all, suffix),
		doc:       doc,
		params:    concat([]common.Parameter{pretty}, parameters(&metav1.ListOptions{}), params),
		produces:  w.mediaTypes(true),
		writes:    event,
		responses: responses(event, 200),
	})
}

func (w *routeWriter) post(path string, params []common.Parameter) {
	o := w.object("POST")
	kind := w.e.Kind.Kind
	if w.e.Subresource != "" {
		kind = w.parent
	}
	doc := "create" + genericapi.GetArticleForNoun(kind, " ") + kind
	if w.e.Subresource != "" {
		doc = "create " + w.e.Subresource + " of" + genericapi.GetArticleForNoun(kind, " ") + kind
	}
	w.add("post", &route{
		method:    "POST",
		path:      path,
		operation: w.operation("create", false, ""),
		doc:       doc,
		params: concat([]common.Parameter{pretty}, parameters(&metav1.CreateOptions{}), params,
			[]common.Parameter{body(true)}),
		produces:  w.produces("POST", false),
		reads:     w.sample(w.e.Kind),
		writes:    o,
		responses: responses(o, 200, 201, 202),
	})
}

func (w *routeWriter) replace(path string, params []common.Parameter) {
	o := w.object("PUT")
	w.add("put", &route{
		method:    "PUT",
		path:      path,
		operation: w.operation("replace", false, ""),
		doc:       w.doc("replace the specified ", "replace % of the specified "),
		params: concat([]common.Parameter{pretty}, parameters(&metav1.UpdateOptions{}), params,
			[]common.Parameter{body(true)}),
		produces:  w.produces("PUT", false),
		reads:     w.sample(w.e.Kind),
		writes:    o,
		responses: responses(o, 200, 201),
	})
}

func (w *routeWriter) patch(path string, params []common.Parameter) {
	o := w.object("PATCH")
	w.add("patch", &route{
		method:    "PATCH",
		path:      path,
		operation: w.operation("patch", false, ""),
		doc:       w.doc("partially update the specified ", "partially update % of the specified "),
		params: concat([]common.Parameter{pretty}, parameters(&metav1.PatchOptions{}), params,
			[]common.Parameter{body(true)}),
		consumes: []string{string(types.JSONPatchType), string(types.MergePatchType),
			string(types.StrategicMergePatchType), string(types.ApplyYAMLPatchType)},
		produces:  w.produces("PATCH", false),
		reads:     metav1.Patch{},
		writes:    o,
		responses: responses(o, 200, 201),
	})
}

func (w *routeWriter) remove(method, path string, params []common.Parameter, collection bool) {
	var answer any = metav1.Status{}
	action, operation, codes := "delete", w.operation("delete", false, ""), []int{200, 202}
	extra := parameters(&metav1.DeleteOptions{})
	article := genericapi.GetArticleForNoun(w.parent, " ")
	doc := w.doc("delete"+article, "delete % of"+article)
	if collection {
		action, operation, codes = "deletecollection", w.operation("deletecollection", false, ""), []int{200}
		doc = w.doc("delete collection of ", "delete collection of % of a ")
		extra = append(extra, parameters(&metav1.ListOptions{}, "watch", "allowWatchBookmarks")...)
	} else if m, ok := w.e.Storage.(rest.MayReturnFullObjectDeleter); ok && m.DeleteReturnsDeletedObject() {
		answer = w.object("DELETE")
	}
	w.add(action, &route{
		method:    method,
		path:      path,
		operation: operation,
		doc:       doc,
		params:    concat([]common.Parameter{pretty}, extra, params, []common.Parameter{body(false)}),
		produces:  w.produces("DELETE", false),
		reads:     metav1.DeleteOptions{},
		writes:    answer,
		responses: responses(answer, codes...),
	})
}

func (w *routeWriter) connect(path string, params []common.Parameter, suffix string) {
	c := w.e.Storage.(rest.Connecter)
	opts, _, _ := c.NewConnectOptions()
	for _, method := range c.ConnectMethods() {
		var o any = "string"
		if m, ok := w.e.Storage.(rest.StorageMetadata); ok && m.ProducesObject(method) != nil {
			o = m.ProducesObject(method)
		}
		w.add("connect", &route{
			method: method,
			path:   path,
			operation: w.operation("connect"+cases.Title(language.English).String(strings.ToLower(method)),
				false, suffix),
			doc:       w.doc("connect "+method+" requests to ", "connect "+method+" requests to % of "),
			params:    concat(w.versionedOptions(opts), params),
			produces:  []string{"*/*"},
			writes:    o,
			responses: responses(o, 200),
		})
	}
}

func concat(lists ...[]common.Parameter) []common.Parameter {
	var all []common.Parameter
	seen := map[string]bool{}
	for _, l := range lists {
		for _, p := range l {
			if !seen[p.Name()] {
				seen[p.Name()] = true
				all = append(all, p)
			}
		}
	}
	return all
}

// parameters are the query parameters that an options type's fields make.
func parameters(options any, except ...string) []common.Parameter {
	docs := map[string]string{}
	if d, ok := options.(interface{ SwaggerDoc() map[string]string }); ok {
		docs = d.SwaggerDoc()
	}
	var all []common.Parameter
	t := reflect.TypeOf(options).Elem()
	for i := range t.NumField() {
		f := t.Field(i)
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		dataType, ok := jsonType(f.Type)
		if name == "" || !ok || slices.Contains(except, name) {
			continue
		}
		all = append(all, parameter{
			name:        name,
			description: docs[name],
			dataType:    dataType,
			kind:        common.QueryParameterKind,
		})
	}
	return all
}

func jsonType(t reflect.Type) (string, bool) {
	switch t.Kind() {
	case reflect.Pointer:
		if t.Elem() == reflect.TypeFor[metav1.Time]() {
			return "string", true
		}
		return jsonType(t.Elem())
	case reflect.Slice:
		return jsonType(t.Elem())
	case reflect.Struct, reflect.Interface, reflect.Map:
		return "", false
	case reflect.Bool:
		return "boolean", true
	case reflect.String, reflect.Uint8:
		return "string", true
	case reflect.Float32, reflect.Float64:
		return "number", true
	}
	return "integer", true
}
