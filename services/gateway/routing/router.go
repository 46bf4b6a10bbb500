// Package routing routes a request for a resource to the service that serves it. Lists and watches of stored resources
// go to the watch tier, or to registry if the client is authn, authz or admission. All other requests go to registry.
// During a write, the package also calls admission, authz and authn on the registry's behalf.
//
// Router.ServeHTTP finds the resource. requestContext.dispatch negotiates the encoding and switches on the verb:
//
//	get                registry serves it.
//	list, watch        plan chooses the source.
//	create, …, delete  write sends the request to registry and serves its callbacks.
//	connect            registry returns the URL, and package proxy connects the client.
//
// A request runs on its handler's goroutine. AdmissionRules.Run needs a goroutine of its own.
package routing

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/endpoints/responsewriter"
	"k8s.io/apiserver/pkg/warning"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/telemetry"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/delegatedauth"
	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/proxy"
	"watershed.dev/services/gateway/responsewriters"
	"watershed.dev/services/gateway/watch"
)

// Router serves /api and /apis.
type Router struct {
	Discovery      *discovery.Watcher
	AdmissionRules *AdmissionRules
	// Objects is the registry, for requests that the watch tier does not serve.
	Objects registryv1.ObjectsClient
	// Tier is the watch tier. Internal is the registry, which serves the reads of authn, authz and admission.
	Tier, Internal Source
	// Lists shares the lists that registry serves. PriorityLists does so for users of identity.IsPriority. Their lists
	// do not wait behind other users' lists.
	Lists, PriorityLists *ListGroups
	// Admission, Authn and Authz serve the registry's callbacks during a write.
	Admission  admissionv1.AdmissionClient
	Authn      authnv1.AuthnClient
	Authz      authzv1.AuthzClient
	Authorizer *delegatedauth.Authorizer
	// Proxy connects clients with kubelets, pods, services and nodes.
	Proxy *proxy.Handler
	// MinRequestTimeout is the least duration of a watch without timeoutSeconds.
	MinRequestTimeout time.Duration
	// RecordListSize receives the size of each list in bytes, and whether it is compressed. It may be nil.
	RecordListSize func(r *http.Request, bytes int64, compressed bool)
	// ListSize returns the size in bytes of the last equal list, or 0 if it is not recorded. It may be nil.
	ListSize func(r *http.Request) int64
	// Stopping returns a channel that closes when the gateway shuts down. The watch of the request then ends. nil: a
	// shutdown does not end the watch.
	Stopping func(context.Context) <-chan struct{}
	// Traffic counts requests, except watches and connections. It may be nil.
	Traffic *telemetry.Traffic
	// Slow has the recent slow requests that Traffic counts. It may be nil.
	Slow *SlowRequests

	// unread bounds the lists of registry that clients have not read.
	unread unreadLists
}

// connections are the subresources whose requests last as long as their clients.
var connections = []string{"attach", "exec", "log", "portforward", "proxy"}

// Source serves lists from encoded bytes, and the watches that continue them.
type Source struct {
	Lists   Lister
	Watches *watch.Hub
}

// requestContext is the state of a request for a resource. One goroutine uses it.
type requestContext struct {
	router      *Router
	w           http.ResponseWriter
	req         *http.Request
	info        *request.RequestInfo
	apiResource *registryv1.APIResource
	dialect     dialect
	user        *commonv1.User
	// out is the negotiated encoding.
	out *registryv1.Output
	// body is the body of a write.
	body []byte
	// rejected is set by reject.
	rejected bool
}

// ServeHTTP implements http.Handler.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	info, _ := request.RequestInfoFrom(req.Context())
	view := r.Discovery.View()
	if view == nil {
		responsewriters.Error(w, req, responsewriters.V1, errStarting())
		return
	}
	apiResource, err := findResource(view, info, req)
	switch {
	case errors.Is(err, errNoPath):
		responsewriters.NotFound(w, req)
		return
	case err != nil:
		responsewriters.Error(w, req, schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}, err)
		return
	}
	u, _ := request.UserFrom(req.Context())
	c := &requestContext{
		router:      r,
		w:           w,
		req:         req,
		info:        info,
		apiResource: apiResource,
		dialect:     dialectOf(apiResource),
		user:        identity.UserProto(u),
	}
	c.serve()
}

// serve serves the request and records its metrics when it ends, as upstream's InstrumentHandlerFunc does
// (k8s.io/apiserver/pkg/endpoints/metrics). A detached watch ends after its handler.
func (c *requestContext) serve() {
	req := c.req
	received, ok := request.ReceivedTimestampFrom(req.Context())
	if !ok {
		received = time.Now()
	}
	deprecated := c.dialect.deprecated(c)
	delegate := &metrics.ResponseWriterDelegator{ResponseWriter: c.w}
	c.w = responsewriter.WrapForHTTP1Or2(delegate)
	c.dispatch()
	status, size := delegate.Status(), delegate.ContentLength()
	monitoredRequest := func() *http.Request { return req }
	if c.isInternal() { // upstream counts the requests of this user as the API server's own
		ctx := request.WithUser(req.Context(), &user.DefaultInfo{Name: user.APIServerUser})
		req = req.WithContext(ctx)
	}
	if h2writer.Detached(req) && !deprecated { // the metrics of a deprecated resource annotate the audit event
		monitoredRequest = monitored(req, c.info)
	}
	info, removed, rejected, stream := c.info, c.apiResource.RemovedRelease, c.rejected, h2writer.StreamFrom(req)
	verb, scope := c.dialect.metricsLabels(c)
	traffic, slow := c.router.Traffic, c.router.Slow
	if info.Verb == "watch" || slices.Contains(connections, info.Subresource) {
		traffic = nil
	}
	h2writer.AtEnd(req, func(panicked any) {
		if traffic != nil {
			took := time.Since(received)
			traffic.Observe(took)
			if took >= SlowThreshold {
				slow.add(monitoredRequest(), info, status, took)
			}
		}
		if stream != nil {
			size += int(stream.Written()) // a hijacked body bypasses the delegate
		}
		if panicked == nil && !rejected {
			metrics.MonitorRequest(monitoredRequest(), verb, info.APIGroup, info.APIVersion, info.Resource,
				info.Subresource, scope, metrics.APIServerComponent, deprecated, removed, status, size,
				time.Since(received))
		}
	})
}

// monitored returns a function that returns a request with the parts of req that metrics.MonitorRequest reads. A
// detached watch retains only these.
func monitored(req *http.Request, info *request.RequestInfo) func() *http.Request {
	method, url := req.Method, req.URL
	u, hasUser := request.UserFrom(req.Context())
	trackers, hasTrackers := request.LatencyTrackersFrom(req.Context())
	waited := time.Duration(0)
	if hasTrackers {
		waited = trackers.APFQueueWaitTracker.GetLatency() // a watch calls no webhooks
	}
	return func() *http.Request {
		ctx := request.WithRequestInfo(context.Background(), info)
		if hasUser {
			ctx = request.WithUser(ctx, u)
		}
		if hasTrackers {
			ctx = request.WithLatencyTrackers(ctx)
			request.TrackAPFQueueWaitLatency(ctx, waited)
		}
		return (&http.Request{Method: method, URL: url}).WithContext(ctx)
	}
}

func errStarting() error { return errRetry("the API is starting: registry has not answered yet") }

// errRetry returns an error that clients of client-go retry after a second.
func errRetry(reason string) error {
	e := apierrors.NewServiceUnavailable(reason)
	e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
	return e
}

// errNoPath is the error for a path that no server handles. The response is a plain 404.
var errNoPath = errors.New("no server for the path")

// findResource returns the resource that a path names, or the error that it does not exist.
func findResource(view *discovery.View, info *request.RequestInfo, req *http.Request) (*registryv1.APIResource, error) {
	apiResource, ok := view.APIResource(info.APIGroup, info.APIVersion, info.Resource, info.Subresource)
	if ok && dialectOf(apiResource).hasPath(apiResource, info, req) {
		return apiResource, nil
	}
	if main, defined := view.APIResource(info.APIGroup, info.APIVersion, info.Resource, ""); !ok && defined {
		if err := dialectOf(main).missingSubresource(main, info); err != nil {
			addWarnings(req.Context(), main)
			return nil, err
		}
	}
	if view.BuiltIn(info.APIGroup) {
		return nil, responsewriters.PageNotFound
	}
	return nil, errNoPath
}

// addWarnings adds the warnings of a deprecated version to the response.
func addWarnings(ctx context.Context, r *registryv1.APIResource) {
	for _, text := range r.Warnings {
		warning.AddWarning(ctx, "", text)
	}
}

// dispatch serves the request by its verb.
func (c *requestContext) dispatch() {
	addWarnings(c.req.Context(), c.apiResource)
	if len(c.apiResource.ConnectMethods) > 0 {
		if !slices.Contains(c.apiResource.ConnectMethods, c.req.Method) {
			c.fail(c.reject(responsewriters.MethodNotAllowed))
			return
		}
		c.connect()
		return
	}
	err := c.dialect.checkVerb(c)
	if err == nil {
		c.out, err = c.negotiate()
	}
	if err != nil {
		c.fail(err)
		return
	}
	switch c.info.Verb {
	case "get":
		if c.apiResource.GetWithOptions {
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

func (c *requestContext) hasVerb(verb string) bool { return slices.Contains(c.apiResource.Verbs, verb) }

func (c *requestContext) groupResource() schema.GroupResource {
	return schema.GroupResource{Group: c.info.APIGroup, Resource: c.info.Resource}
}

func (c *requestContext) groupVersion() schema.GroupVersion {
	return schema.GroupVersion{Group: c.apiResource.Kind.Group, Version: c.apiResource.Kind.Version}
}
