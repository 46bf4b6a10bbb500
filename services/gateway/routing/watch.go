package routing

import (
	"context"
	"math"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/httplog"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	basemetrics "k8s.io/component-base/metrics"
	"k8s.io/streaming/pkg/httpstream/wsstream"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/telemetry"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/body"
	"watershed.dev/services/gateway/delegatedauth"
	"watershed.dev/services/gateway/h2writer"
	"watershed.dev/services/gateway/watch"
)

// watch serves a client's stream. The stream survives the loss of replicas.
func (c *requestContext) watch() {
	r, hub, err := c.watchRequest()
	if err != nil {
		c.fail(err)
		return
	}
	open := openWatches().WithLabelValues(metrics.MethodWatch, c.info.APIGroup, c.info.APIVersion, c.info.Resource,
		c.info.Subresource, metrics.CleanScope(c.info), metrics.APIServerComponent)
	open.Inc()
	defer h2writer.AtEnd(c.req, func(any) { open.Dec() })
	if wsstream.IsWebSocketRequest(c.req) {
		c.serveWebSocket(hub, r)
		return
	}
	// The hub encodes the parts of a gzip body, and cborSink cannot read these.
	r.Compress = hub.Config.Compression && !c.isInternal() && body.AcceptsGzip(c.req) &&
		c.out.MediaType != runtime.ContentTypeCBOR
	hub.Serve(c.req.Context(), r, c.eventSink(&httpSink{call: c, control: http.NewResponseController(c.w)}))
}

// openWatches returns upstream's gauge of long-running requests. Upstream counts a request only while a function runs
// (metrics.RecordLongRunning), and a watch may outlast its handler.
var openWatches = sync.OnceValue(func() *basemetrics.GaugeVec {
	metrics.Register()
	return telemetry.UpstreamMetric(basemetrics.NewGaugeVec(&basemetrics.GaugeOpts{
		Subsystem: metrics.APIServerComponent,
		Name:      "longrunning_requests",
		Help: "Gauge of all active long-running apiserver requests broken out by verb, group, version, resource, scope " +
			"and component. Not all requests are tracked this way.",
		StabilityLevel: basemetrics.STABLE,
	}, []string{"verb", "group", "version", "resource", "subresource", "scope", "component"}))
})

// detachable reports whether a watch's handler may return before the watch ends. Upstream's filters log and trace a
// request until its handler returns.
func (c *requestContext) detachable() bool {
	logged := httplog.Unlogged(c.req, nil) != nil
	return !logged && !trace.SpanContextFromContext(c.req.Context()).IsSampled()
}

// watchRequest returns the request for a watch and the hub that serves it. An error rejects the watch.
func (c *requestContext) watchRequest() (*watch.Request, *watch.Hub, error) {
	p, err := c.plan()
	if err != nil {
		return nil, nil, err
	}
	if p.query == nil {
		return nil, nil, c.watchRefusal(p.opts)
	}
	version, err := watchVersion(p.opts.ResourceVersion)
	if err != nil {
		return nil, nil, err
	}
	if !sourceMediaType(c.sourceOutput().MediaType) {
		return nil, nil, negotiation.NewNotAcceptableError(c.streamMediaTypes())
	}
	bookmarks := p.source.Watches.Config.BookmarkPeriod
	if p.isInternal {
		bookmarks = 0
	}
	timeout := time.Duration(float64(c.router.MinRequestTimeout) * (rand.Float64() + 1))
	if s := p.opts.TimeoutSeconds; s != nil && *s != 0 { // a negative timeout ends the watch at once
		timeout = time.Duration(*s) * time.Second
	}
	// The namespace of the authorized attributes: a RoleBinding in a Namespace may allow the watch of that object.
	authorizer, namespace := c.router.Authorizer, c.info.Namespace
	r := &watch.Request{
		WatchRequest: &watchfanoutv1.WatchRequest{
			Query:             p.query,
			ResourceVersion:   version,
			AllowBookmarks:    p.opts.AllowWatchBookmarks,
			SendInitialEvents: p.opts.SendInitialEvents,
			Owner:             identity.QuotaOwner(c.user, c.req.RemoteAddr),
		},
		User:            c.user.GetName(),
		StorageResource: c.apiResource.StorageResource,
		Log:             c.apiResource.Log,
		Deadline:        time.Now().Add(timeout),
		BookmarkPeriod:  bookmarks,
		Stopping:        c.router.Stopping(c.req.Context()),
		PolicyChanged:   func() <-chan struct{} { return authorizer.PolicyChanged(namespace) },
		Allowed:         c.reauthorizer(),
		Initialized:     c.initialized,
	}
	if s := p.opts.SendInitialEvents; s != nil && *s && p.opts.AllowWatchBookmarks { // a bookmark ends them
		r.InitialEventsEnd = c.recordWatchList(p.opts)
	}
	if c.detachable() {
		r.Detached = delegatedauth.Detached(c.req.Context())
	}
	return r, p.source.Watches, nil
}

// initialized releases a watch's seats and reports the size of its initial events to flow control, because informers
// may never list.
func (c *requestContext) initialized(bytes int64) {
	flowcontrol.WatchInitialized(c.req.Context())
	if bytes > 0 {
		c.recordListSize(bytes, false)
	}
}

// recordWatchList returns a function that records how long the initial events of a watch took.
func (c *requestContext) recordWatchList(opts *internalversion.ListOptions) func() {
	gvr := schema.GroupVersionResource{Group: c.info.APIGroup, Version: c.info.APIVersion, Resource: c.info.Resource}
	scope := metrics.CleanListScope(request.WithNamespace(c.req.Context(), c.namespace()), opts)
	received, ok := request.ReceivedTimestampFrom(c.req.Context())
	if !ok {
		return nil
	}
	return func() { metrics.RecordWatchListLatency(context.Background(), gvr, scope, time.Since(received)) }
}

// watchVersion parses a watch's resourceVersion as kube-apiserver does, with its error: any spelling of a 64-bit
// number.
func watchVersion(v string) (string, error) {
	if v == "" {
		return "", nil
	}
	n, err := storage.APIObjectVersioner{}.ParseResourceVersion(v)
	return strconv.FormatUint(min(n, math.MaxInt64), 10), err
}

// reauthorizer returns a function that repeats the authorization filter's check.
func (c *requestContext) reauthorizer() func(context.Context) bool {
	authorizer := c.router.Authorizer
	attrs, err := filters.GetAuthorizerAttributes(c.req.Context())
	return func(ctx context.Context) bool { return err == nil && authorizer.Reauthorize(ctx, attrs) }
}

// watchRefusal returns the error for a watch that no source can serve. The text comes from registry: it rejects a list
// with limit 1. Registry finds most errors before it reads. It checks includeObject only after the read, so the list
// has no selectors. A selector without a match would make registry read the whole resource.
func (c *requestContext) watchRefusal(opts *internalversion.ListOptions) error {
	r := c.getRequest()
	r.Output = &registryv1.Output{MediaType: runtime.ContentTypeJSON, As: c.out.As}
	q := c.req.URL.Query()
	q.Set("limit", "1")
	q.Del("labelSelector")   // plan has parsed it
	q.Del("resourceVersion") // with a limit it would be an exact version
	if !q.Has("sendInitialEvents") {
		q.Del("resourceVersionMatch") // it requires a resourceVersion
	}
	_, supported, err := c.fieldSelector(opts.FieldSelector)
	if supported && err == nil {
		q.Del("fieldSelector")
		q.Del("shardSelector")
	}
	r.Query = q.Encode()
	if _, err := c.readShared(r); err != nil {
		return err
	}
	if err == nil && !supported { // registry has a newer CRD, with this field
		return errRetry("the gateway's discovery does not have the field yet")
	}
	return apierrors.NewMethodNotSupported(c.groupResource(), "watch")
}
