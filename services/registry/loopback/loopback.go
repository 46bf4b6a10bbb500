// Package loopback is a client-go transport to the registry's own handlers, for upstream's allocators and controllers,
// which are written against client-go. A request runs its handler in the caller's goroutine. A watch runs in a
// goroutine that ends with its response body. No socket is opened.
//
// Requests run as system:apiserver. The package does not authenticate or authorize them and does not call admission.
package loopback

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/apiserver/pkg/endpoints/request"
	restclient "k8s.io/client-go/rest"
	"k8s.io/component-base/version"

	"watershed.dev/platform/discovery"
	"watershed.dev/platform/paths"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/lookup"
)

// Registry is the set of served resources that a loopback calls.
type Registry interface {
	// RequestScope returns the scope of a resource. An error is an API status.
	RequestScope(context.Context, *commonv1.Resource) (*handlers.RequestScope, error)
	// APIResources returns all served resources.
	APIResources() []*registryv1.APIResource
}

// Watches serves watches.
type Watches interface {
	// Watch streams the frames of a watch until the context of the stream is done.
	Watch(*watchfanoutv1.WatchRequest, grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error
}

// Loopback is an http.RoundTripper to the registry's handlers.
type Loopback struct {
	registry Registry
	watches  Watches
}

// New returns a loopback to r and w.
func New(r Registry, w Watches) *Loopback { return &Loopback{r, w} }

var systemUser = &commonv1.User{Name: "system:apiserver", Groups: []string{"system:masters"}}

// Config returns a client configuration that uses the loopback.
func (l *Loopback) Config() *restclient.Config {
	return &restclient.Config{
		Host:          "https://registry.internal",
		Transport:     l,
		QPS:           -1,
		UserAgent:     "kube-apiserver/" + version.Get().GitVersion,
		ContentConfig: restclient.ContentConfig{ContentType: runtime.ContentTypeJSON},
	}
}

// RoundTrip implements http.RoundTripper.
func (l *Loopback) RoundTrip(req *http.Request) (*http.Response, error) {
	var body []byte
	if req.Body != nil {
		defer req.Body.Close()
		var err error
		if body, err = io.ReadAll(req.Body); err != nil {
			return nil, err
		}
	}
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		return nil, err
	}
	// The controller of the kubernetes Service polls this path at its start. The registry is ready by then.
	if info.Path == "/readyz" {
		return newResponse(req, http.StatusOK, []byte("ok")), nil
	}
	if !info.IsResourceRequest {
		return l.discovery(req, info)
	}
	r := &commonv1.Resource{
		Group:       info.APIGroup,
		Version:     info.APIVersion,
		Resource:    info.Resource,
		Subresource: info.Subresource,
	}
	scope, err := l.registry.RequestScope(req.Context(), r)
	if err != nil {
		return errorResponse(req, err), nil
	}
	began := time.Now()
	resp := l.serve(req, scope, r, info, body)
	record := func() { monitor(req, info, resp, time.Since(began)) }
	watch, ok := resp.Body.(*pipeBody)
	if !ok {
		record()
		return resp, nil
	}
	done := watch.done
	watch.done = sync.OnceFunc(func() { done(); record() })
	return resp, nil
}

// monitor records a request in the metrics of API requests, as kube-apiserver does for its own requests.
func monitor(req *http.Request, info *request.RequestInfo, resp *http.Response, took time.Duration) {
	ctx := request.WithUser(request.WithRequestInfo(context.Background(), info), apiServer)
	metrics.MonitorRequest(req.WithContext(ctx), strings.ToUpper(info.Verb), info.APIGroup, info.APIVersion,
		info.Resource, info.Subresource, metrics.CleanScope(info), metrics.APIServerComponent, false, "",
		resp.StatusCode, int(resp.ContentLength), took)
}

var apiServer = &user.DefaultInfo{Name: systemUser.Name}

// serve runs a request on its scope.
func (l *Loopback) serve(
	req *http.Request,
	scope *handlers.RequestScope,
	r *commonv1.Resource,
	info *request.RequestInfo,
	body []byte,
) *http.Response {
	// The parent context may belong to a write. Its callbacks must not be used for the system user.
	ctx := lookup.WithRequestInfo(context.Background(), info.Verb, r, systemUser, info.Namespace, info.Name)
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(req.Context(), cancel)
	done := func() { stop(); cancel() }
	out := &registryv1.Output{MediaType: runtime.ContentTypeJSON}
	get := &registryv1.GetRequest{
		Resource:  r,
		Namespace: info.Namespace,
		Name:      info.Name,
		User:      systemUser,
		Query:     req.URL.RawQuery,
		Output:    out,
	}
	switch info.Verb {
	case "get":
		defer done()
		resp, err := scope.Get(ctx, get)
		return objectResponse(req, resp, err)
	case "list":
		defer done()
		data, err := scope.List(ctx, get)
		return objectResponse(req, &registryv1.ObjectResponse{Code: http.StatusOK, Body: data}, err)
	case "watch":
		return l.watch(ctx, done, req, scope.APIResource, info.Namespace)
	}
	defer done()
	resp, err := scope.Write(ctx, &registryv1.WriteRequest{
		Verb:        info.Verb,
		Resource:    r,
		Namespace:   info.Namespace,
		Name:        info.Name,
		User:        systemUser,
		Query:       req.URL.RawQuery,
		ContentType: req.Header.Get("Content-Type"),
		Body:        body,
		Output:      out,
		UserAgent:   req.UserAgent(),
		Path:        req.URL.Path,
	}, systemCallbacks{})
	return objectResponse(req, resp, err)
}

// systemCallbacks allows and admits every write of the loopback. It is its handlers.Callbacks.
type systemCallbacks struct{}

func (systemCallbacks) Lifecycle() admission.MutationInterface { return nil }
func (systemCallbacks) Review(context.Context, registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error) {
	return &admissionv1.Verdict{}, nil
}
func (systemCallbacks) Authorize(context.Context, *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	return &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW}, nil
}

func (systemCallbacks) ReviewToken(
	context.Context,
	*authnv1.ReviewTokenRequest,
) (*authnv1.AuthenticateResponse, error) {
	return nil, errors.New("the loopback does not serve token reviews and rules reviews")
}
func (systemCallbacks) Rules(context.Context, *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	return nil, errors.New("the loopback does not serve token reviews and rules reviews")
}

func objectResponse(req *http.Request, resp *registryv1.ObjectResponse, err error) *http.Response {
	if err != nil {
		return errorResponse(req, err)
	}
	return newResponse(req, int(resp.Code), resp.Body)
}

func errorResponse(req *http.Request, err error) *http.Response {
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		err = apierrors.NewInternalError(err)
		errors.As(err, &api)
	}
	st := responsewriters.ErrorToAPIStatus(api.(error))
	data, _ := json.Marshal(st)
	return newResponse(req, int(st.Code), data)
}

func newResponse(req *http.Request, code int, body []byte) *http.Response {
	return &http.Response{
		StatusCode:    code,
		Status:        http.StatusText(code),
		Proto:         "HTTP/2.0",
		ProtoMajor:    2,
		Request:       req,
		Header:        http.Header{"Content-Type": {runtime.ContentTypeJSON}},
		Body:          io.NopCloser(bytes.NewReader(body)),
		ContentLength: int64(len(body)),
	}
}

// discovery returns the resources of a version, which the validation of policies reads.
func (l *Loopback) discovery(req *http.Request, info *request.RequestInfo) (*http.Response, error) {
	list := metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}}
	gv, err := schema.ParseGroupVersion(strings.TrimPrefix(strings.TrimPrefix(info.Path, "/apis/"), "/api/"))
	if err == nil {
		list.GroupVersion = gv.String()
		for _, apiResource := range l.registry.APIResources() {
			if r := apiResource.Resource; r.Group == gv.Group && r.Version == gv.Version {
				list.APIResources = append(list.APIResources, discovery.ToMetaV1(apiResource))
			}
		}
	}
	if len(list.APIResources) == 0 {
		return errorResponse(req, apierrors.NewNotFound(schema.GroupResource{}, info.Path)), nil
	}
	data, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	return newResponse(req, http.StatusOK, data), nil
}
