package routing

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/warning"

	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/edge"
	"watershed.dev/services/gateway/streaming"
	"watershed.dev/services/gateway/watch"
)

// Router serves /api and /apis.
type Router struct {
	Catalog   *Catalog
	Interests *Interests
	// Objects retries a call that did not reach a replica; Writes never sends one twice.
	Objects registryv1.ObjectsClient
	Writes  registryv1.ObjectsClient
	// Tier answers lists and GETs, and Watches keeps what it says of what comes after them.
	Tier    watchfanoutv1.WatchClient
	Watches *watch.Hub
	// Policy and PolicyWatches are the same of registry, for the services that decide by what they read.
	Policy        watchfanoutv1.PolicyClient
	PolicyWatches *watch.Hub
	// TierGets: the watch tier answers a GET of an object as it is stored.
	TierGets bool
	// Lists shares the lists that registry answers.
	Lists *coalesce.Group[[]byte]
	// FirstLists are those that do not wait for anybody else's.
	FirstLists *coalesce.Group[[]byte]
	Admission  admissionv1.AdmissionClient
	Authn      authnv1.AuthnClient
	Authz      authzv1.AuthzClient
	Authorize  *edge.Authorizer
	// Carrier carries bytes to kubelets, pods, services and nodes.
	Carrier *streaming.Carrier
	// MinRequestTimeout is the least time that a watch without timeoutSeconds stays open.
	MinRequestTimeout time.Duration
	// Stopping answers what ends a watch when it is closed: the gateway is shutting down.
	Stopping func() <-chan struct{}
}

// call is one request for a resource.
type call struct {
	*Router
	w     http.ResponseWriter
	req   *http.Request
	info  *request.RequestInfo
	entry *registryv1.ResourceEntry
	user  *commonv1.User
	out   *registryv1.Output
}

// ServeHTTP implements http.Handler.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	info, _ := request.RequestInfoFrom(req.Context())
	view := r.Catalog.View()
	if view == nil {
		edge.WriteError(w, req, schema.GroupVersion{Version: "v1"}, starting())
		return
	}
	entry, ok := view.Entry(info.APIGroup, info.APIVersion, info.Resource, info.Subresource)
	if main, custom := view.Entry(info.APIGroup, info.APIVersion, info.Resource, ""); custom && main.Untyped && scoped(main, info) && !ok {
		edge.WriteError(w, req, schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}, apierrors.NewNotFound(schema.GroupResource{Group: info.APIGroup, Resource: info.Resource}, info.Name))
		return
	}
	if !ok || !placed(entry, info, req) {
		if view.BuiltIn(info.APIGroup) {
			edge.WriteCode(w, req, http.StatusNotFound, "Page Not Found")
		} else {
			edge.NotFound(w, req)
		}
		return
	}
	u, _ := request.UserFrom(req.Context())
	c := &call{Router: r, w: w, req: req, info: info, entry: entry, user: identity.UserProto(u)}
	scope := "cluster" // as k8s.io/apiserver/pkg/endpoints/installer.go has it
	if info.Name != "" || info.Verb == "create" {
		scope = "resource"
	} else if info.Namespace != "" {
		scope = "namespace"
	}
	metrics.InstrumentHandlerFunc(strings.ToUpper(info.Verb), info.APIGroup, info.APIVersion, info.Resource, info.Subresource, scope, metrics.APIServerComponent,
		entry.Deprecation != "" || entry.Untyped && len(entry.Warnings) > 0, entry.RemovedRelease, func(w http.ResponseWriter, req *http.Request) {
			c.w, c.req = w, req
			c.serve()
		})(w, req)
}

func starting() error {
	e := apierrors.NewServiceUnavailable("the API is starting: registry has not answered yet")
	e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
	return e
}

// placed says whether the path is one that the resource has: a cluster's own objects have no namespace, a namespaced
// object has one, and what can only be created has neither lists nor names.
func placed(e *registryv1.ResourceEntry, info *request.RequestInfo, req *http.Request) bool {
	if e.Untyped {
		return scoped(e, info)
	}
	has := func(verbs ...string) bool {
		return slices.ContainsFunc(verbs, func(v string) bool { return slices.Contains(e.Verbs, v) })
	}
	switch {
	case len(e.ConnectMethods) > 0:
		// What was authorized is what the path said. There is one path to what is connected to, and it says what the method
		// does.
		if info.Name == "" || watchPath(req) || len(info.Parts) < 2 || info.Parts[1] != info.Name || info.Verb != methodVerbs[req.Method] {
			return false
		}
	case info.Name != "" && info.Subresource == "" && !has("get", "update", "patch", "delete"),
		e.Namespaced && info.Namespace == "" && info.Name == "" && !has("list", "watch"),
		watchPath(req) && !has("watch"):
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

// methodVerbs are what RequestInfo makes of methods for a path that names an object.
var methodVerbs = map[string]string{http.MethodPost: "create", http.MethodGet: "get", http.MethodHead: "get", http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete", http.MethodOptions: ""}

// scoped is placed for custom resources, of whose paths only the namespace is looked at.
func scoped(e *registryv1.ResourceEntry, info *request.RequestInfo) bool {
	if !e.Namespaced {
		return info.Namespace == ""
	}
	return info.Namespace != "" || info.Verb == "list" || info.Verb == "watch"
}

// watchPath recognizes the old form of a watch, /api/v1/watch/….
func watchPath(req *http.Request) bool {
	parts := strings.SplitN(strings.TrimPrefix(req.URL.Path, "/"), "/", 5)
	return len(parts) > 3 && (parts[0] == "api" && parts[2] == "watch" || len(parts) > 4 && parts[0] == "apis" && parts[3] == "watch")
}

func (c *call) gv() schema.GroupVersion {
	return schema.GroupVersion{Group: c.entry.Kind.Group, Version: c.entry.Kind.Version}
}

func (c *call) fail(err error) {
	var warned *rpc.WarnedError
	if errors.As(err, &warned) {
		for _, t := range warned.Warnings {
			warning.AddWarning(c.req.Context(), "", t)
		}
		err = warned.Unwrap()
	}
	edge.WriteError(c.w, c.req, c.gv(), err)
}

func (c *call) serve() {
	for _, text := range c.entry.Warnings {
		warning.AddWarning(c.req.Context(), "", text)
	}
	if len(c.entry.ConnectMethods) > 0 {
		if !slices.Contains(c.entry.ConnectMethods, c.req.Method) {
			edge.WriteCode(c.w, c.req, http.StatusMethodNotAllowed, "Method Not Allowed")
			return
		}
		c.connect()
		return
	}
	if c.info.Verb == "watch" && c.req.Method == http.MethodGet && c.has("list") && !c.has("watch") || c.entry.Untyped && !c.custom() {
		c.fail(apierrors.NewMethodNotSupported(c.groupResource(), c.info.Verb))
		return
	}
	if c.entry.Untyped { // kube-apiserver's web framework does not see these
	} else if c.req.Method == http.MethodHead || !c.allowed() {
		edge.WriteCode(c.w, c.req, http.StatusMethodNotAllowed, "Method Not Allowed")
		return
	}
	if c.info.Verb == "patch" && !c.entry.Untyped && !slices.Contains(c.patchTypes(), mediaType(c.req)) {
		edge.WriteCode(c.w, c.req, http.StatusUnsupportedMediaType, "Unsupported Media Type")
		return
	}
	if c.info.Verb == "patch" && c.entry.Untyped && !slices.Contains(c.patchTypes(), mediaType(c.req)) {
		c.fail(negotiation.NewUnsupportedMediaTypeError(c.patchTypes()))
		return
	}
	var err error
	if c.out, err = c.negotiate(); err != nil {
		c.fail(err)
		return
	}
	switch c.info.Verb {
	case "get":
		if c.entry.GetWithOptions {
			c.connect()
			return
		}
		c.get()
	case "list":
		c.list()
	case "watch":
		c.watch()
	default:
		c.write()
	}
}

// custom says whether a custom resource knows the verb at all; what is being deleted refuses in its own words.
func (c *call) custom() bool {
	if c.entry.Resource.Subresource != "" {
		return c.has(c.info.Verb)
	}
	return slices.Contains([]string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}, c.info.Verb)
}

func (c *call) groupResource() schema.GroupResource {
	return schema.GroupResource{Group: c.info.APIGroup, Resource: c.info.Resource}
}

// allowed says whether the verb exists where it was asked for: create on a collection, update on an object.
func (c *call) allowed() bool {
	named := c.info.Name != ""
	if watchPath(c.req) && c.req.Method != http.MethodGet {
		return false
	}
	switch v := c.info.Verb; v {
	case "get", "update", "patch", "delete":
		if !named {
			return false
		}
		return c.has(v)
	case "create":
		return c.has(v) && (c.entry.Resource.Subresource != "" || !named) && (c.info.Namespace != "" || !c.entry.Namespaced)
	case "deletecollection":
		return c.has(v) && !named && (c.info.Namespace != "" || !c.entry.Namespaced)
	default:
		return c.has(v)
	}
}

func (c *call) has(verb string) bool {
	for _, v := range c.entry.Verbs {
		if v == verb {
			return true
		}
	}
	return false
}

// patchTypes are the media types that a patch may have; only types of Go's own can be merged strategically.
func (c *call) patchTypes() []string {
	all := []string{string(types.JSONPatchType), string(types.MergePatchType), string(types.ApplyYAMLPatchType)}
	if !c.entry.Untyped {
		all = append(all, string(types.StrategicMergePatchType))
	}
	return all
}

func mediaType(req *http.Request) string {
	t, _, _ := strings.Cut(req.Header.Get("Content-Type"), ";")
	return strings.TrimSpace(t)
}

// negotiate chooses the answer's encoding.
func (c *call) negotiate() (*registryv1.Output, error) {
	refused := !c.entry.Untyped && !edge.Produced(c.req.Header.Get("Accept"), c.entry.MediaTypes)
	if !refused && c.entry.Deprecation != "" {
		warning.AddWarning(c.req.Context(), "", c.entry.Deprecation)
	}
	if refused {
		types := c.entry.MediaTypes
		if c.info.Verb == "list" || c.info.Verb == "watch" {
			types = append(slices.Clone(types), runtime.ContentTypeJSON+";stream=watch")
			if slices.Contains(types, runtime.ContentTypeProtobuf) {
				types = append(types, runtime.ContentTypeProtobuf+";stream=watch")
			}
		}
		return nil, edge.NotProduced(types)
	}
	m, ok := negotiation.NegotiateMediaTypeOptions(c.req.Header.Get("Accept"), c.serializers(), restrictions{c.entry})
	if !ok {
		return nil, negotiation.NewNotAcceptableError(c.entry.MediaTypes)
	}
	out := &registryv1.Output{MediaType: m.Accepted.MediaType, Pretty: m.Pretty || pretty(c.req)}
	if m.Convert != nil {
		out.As = &commonv1.Kind{Group: m.Convert.Group, Version: m.Convert.Version, Kind: m.Convert.Kind}
	}
	return out, nil
}

// serializers are the media types that the resource is served in.
func (c *call) serializers() []runtime.SerializerInfo {
	var all []runtime.SerializerInfo
	for _, s := range edge.Codecs.SupportedMediaTypes() {
		for _, m := range c.entry.MediaTypes {
			if s.MediaType == m {
				all = append(all, s)
			}
		}
	}
	return all
}

// restrictions is which conversions an endpoint offers.
type restrictions struct{ entry *registryv1.ResourceEntry }

func (r restrictions) AllowsMediaTypeTransform(mimeType, mimeSubType string, gvk *schema.GroupVersionKind) bool {
	if gvk == nil {
		return !r.entry.Untyped || mimeSubType == "json" || mimeSubType == "yaml"
	}
	if gvk.Group != metav1.GroupName || gvk.Version != "v1" && gvk.Version != "v1beta1" {
		return false
	}
	switch gvk.Kind {
	case "Table":
		return r.entry.Table && mimeType == "application" && (mimeSubType == "json" || mimeSubType == "yaml")
	case "PartialObjectMetadata", "PartialObjectMetadataList":
		return true
	}
	return false
}

func (restrictions) AllowsServerVersion(v string) bool { return v == "v1" }
func (restrictions) AllowsStreamSchema(s string) bool  { return s == "watch" }

// pretty recognizes people: curl, wget and browsers get indented JSON unless they say otherwise.
func pretty(req *http.Request) bool {
	if strings.Contains(req.URL.RawQuery, "pretty") {
		if p := req.URL.Query().Get("pretty"); p != "" {
			return p == "true" || p == "1" || p == "t" || p == "T" || p == "TRUE" || p == "True"
		}
	}
	agent := req.UserAgent()
	return strings.HasPrefix(agent, "curl") || strings.HasPrefix(agent, "Wget") || strings.HasPrefix(agent, "Mozilla/5.0")
}

func (c *call) read() *registryv1.GetRequest {
	return &registryv1.GetRequest{Resource: c.entry.Resource, Namespace: c.namespace(), Name: c.info.Name, User: c.user, Query: c.req.URL.RawQuery, Output: c.out, Method: c.req.Method}
}

// namespace is the request's; a cluster's own objects have none, though RequestInfo gives a namespace its own name.
func (c *call) namespace() string {
	if !c.entry.Namespaced {
		return ""
	}
	return c.info.Namespace
}

func (c *call) get() {
	if body, ok := c.getFromTier(); ok {
		c.respond(&registryv1.ObjectResponse{Code: http.StatusOK, Body: body})
		return
	}
	resp, err := c.Objects.Get(c.req.Context(), c.read())
	if err != nil {
		c.fail(rpc.FromStatus(err))
		return
	}
	c.respond(resp)
}

func (c *call) respond(resp *registryv1.ObjectResponse) {
	for _, t := range resp.Warnings {
		warning.AddWarning(c.req.Context(), "", t)
	}
	body := newBody(c.w, c.req, c.contentType(), int(resp.Code), int64(len(resp.Body)))
	_, _ = body.Write(resp.Body)
	_ = body.Close()
}

func (c *call) contentType() string {
	return c.out.MediaType
}

// write carries one write to registry and answers what registry asks on the way.
func (c *call) write() {
	body, err := readBody(c.req)
	if err != nil {
		c.fail(err)
		return
	}
	r := c.writeRequest()
	r.ContentType, r.Body, r.Output = c.req.Header.Get("Content-Type"), body, c.out
	m, err := c.converse(r, c.Writes.Write)
	if err != nil {
		c.fail(err)
		return
	}
	c.respond(m.GetResult())
}

func (c *call) writeRequest() *registryv1.WriteRequest {
	r := &registryv1.WriteRequest{Verb: c.info.Verb, Resource: c.entry.Resource, Namespace: c.namespace(), Name: c.info.Name, User: c.user,
		Query: c.req.URL.RawQuery, UserAgent: c.req.UserAgent(), Path: c.req.URL.Path}
	if !c.asksItself() {
		r.Admit, r.Validate = c.Interests.For(c.entry.Resource)
	}
	return r
}

// asksItself says whether the request is a question that admission has while it reviews something else: it is not to be
// reviewed, which might ask again without end. kube-apiserver's plugins ask its authorizer without a request.
func (c *call) asksItself() bool {
	return c.user.GetName() == identity.Admission && slices.Contains(c.user.GetGroups(), identity.ServicesGroup) &&
		c.entry.Resource.GetGroup() == "authorization.k8s.io" && c.entry.Resource.GetResource() == "subjectaccessreviews"
}

// connect asks registry where the request goes, and carries it there.
func (c *call) connect() {
	r := c.writeRequest()
	if c.entry.ConnectSubpath {
		r.Subpath = c.subpath()
	}
	m, err := c.converse(r, c.Objects.Connect)
	if err != nil {
		c.fail(err)
		return
	}
	for _, t := range m.GetConnection().GetWarnings() {
		warning.AddWarning(c.req.Context(), "", t)
	}
	metrics.RecordLongRunning(c.req, c.info, metrics.APIServerComponent, func() {
		c.Carrier.Serve(c.w, c.req, c.info.Name, m.GetConnection(), c.fail)
	})
}

// subpath is what follows the subresource in the path, as kube-apiserver reads it.
func (c *call) subpath() string {
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

// converse sends one request and answers what registry asks until it has an answer.
func (c *call) converse(r *registryv1.WriteRequest, open func(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[registryv1.WriteCall, registryv1.WriteReply], error)) (*registryv1.WriteReply, error) {
	ctx, cancel := context.WithCancel(c.req.Context())
	defer cancel()
	stream, err := open(ctx)
	if err == nil {
		err = stream.Send(&registryv1.WriteCall{Call: &registryv1.WriteCall_Request{Request: r}})
	}
	for err == nil || errors.Is(err, io.EOF) {
		var m *registryv1.WriteReply
		if m, err = stream.Recv(); err != nil {
			break
		}
		if m.GetResult() != nil || m.GetConnection() != nil {
			return m, nil
		}
		err = stream.Send(c.answer(ctx, m))
	}
	return nil, rpc.FromStatus(err)
}

// answer asks the service that registry's question is for. A question that cannot be answered refuses the write.
func (c *call) answer(ctx context.Context, q *registryv1.WriteReply) *registryv1.WriteCall {
	switch q := q.Reply.(type) {
	case *registryv1.WriteReply_Admission:
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Admission{Admission: c.review(ctx, q.Admission)}}
	case *registryv1.WriteReply_Authorization:
		result := &registryv1.AuthorizationResult{}
		var err error
		if result.Decision, err = c.Authorize.Ask(ctx, q.Authorization); err != nil {
			result.Error = err.Error()
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Authorization{Authorization: result}}
	case *registryv1.WriteReply_Token:
		resp, err := c.Authn.ReviewToken(ctx, q.Token)
		if err != nil {
			resp = &authnv1.AuthenticateResponse{Error: err.Error()}
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Token{Token: resp}}
	case *registryv1.WriteReply_Rules:
		resp, err := c.Authz.Rules(ctx, q.Rules)
		if err != nil {
			resp = &authzv1.RulesResponse{Incomplete: true, EvaluationError: err.Error()}
		}
		return &registryv1.WriteCall{Call: &registryv1.WriteCall_Rules{Rules: resp}}
	}
	return &registryv1.WriteCall{}
}

func (c *call) review(ctx context.Context, q *registryv1.AdmissionNeeded) *registryv1.AdmissionResult {
	ask := c.Admission.Validate
	if q.Phase == registryv1.Phase_PHASE_ADMIT {
		ask = c.Admission.Admit
	}
	verdict, err := ask(ctx, q.Review)
	if err == nil {
		return &registryv1.AdmissionResult{Verdict: verdict}
	}
	err = rpc.FromStatus(err)
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		api = rpc.Plain(err)
	}
	st := api.Status()
	return &registryv1.AdmissionResult{Refusal: rpc.StatusProto(&st)}
}

func readBody(req *http.Request) ([]byte, error) {
	if req.Body == nil {
		return nil, nil
	}
	defer req.Body.Close()
	if data, ok := edge.Body(req); ok {
		return data, nil
	}
	limited := &io.LimitedReader{R: req.Body, N: edge.MaxBodyBytes + 1}
	var data []byte
	var err error
	if n := req.ContentLength; n > 0 && n <= edge.MaxBodyBytes {
		data = make([]byte, n)
		_, err = io.ReadFull(limited, data)
	} else {
		data, err = io.ReadAll(limited)
	}
	if err != nil {
		return nil, err
	}
	if limited.N <= 0 {
		return nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("limit is %d", edge.MaxBodyBytes))
	}
	return data, nil
}
