// Package loopback lets client-go, which upstream's allocators and loops are written against, call the registry's own
// verbs: a request goes to the verb and its answer comes back, and a watch reads the event log. Nothing is listened on.
// It is the system itself, so it is not asked who it is, and admission does not apply.
package loopback

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
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
	"watershed.dev/services/registry/resources"
	"watershed.dev/services/registry/tail"
	"watershed.dev/services/registry/verbs"
)

// Registry is what a loopback calls.
type Registry interface {
	// Endpoint finds a resource; an error is the API's own.
	Endpoint(context.Context, *commonv1.Resource) (*verbs.Endpoint, error)
	// Entries are what is served.
	Entries() []*registryv1.APIResource
}

// Loopback is a transport to a registry's own verbs.
type Loopback struct {
	registry Registry
	tail     *tail.Tail
}

// New returns a loopback to r, whose watches read t.
func New(r Registry, t *tail.Tail) *Loopback { return &Loopback{r, t} }

var systemUser = &commonv1.User{Name: "system:apiserver", Groups: []string{"system:masters"}}

// Config is a client's configuration that goes through the loopback.
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
	if !info.IsResourceRequest {
		return l.discovery(req, info)
	}
	r := &commonv1.Resource{
		Group:       info.APIGroup,
		Version:     info.APIVersion,
		Resource:    info.Resource,
		Subresource: info.Subresource,
	}
	e, err := l.registry.Endpoint(req.Context(), r)
	if err != nil {
		return failure(req, err), nil
	}
	return l.ask(req, e, r, info, body), nil
}

// ask has an endpoint answer a request.
func (l *Loopback) ask(req *http.Request, e *verbs.Endpoint, r *commonv1.Resource, info *request.RequestInfo,
	body []byte) *http.Response {
	// The parent context may be a write's; its Gate must not be asked on the system's behalf.
	ctx := resources.Within(context.Background(), info.Verb, r, systemUser, info.Namespace, info.Name)
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
		resp, err := e.Get(ctx, get)
		return responseOf(req, resp, err)
	case "list":
		defer done()
		data, err := e.List(ctx, get)
		return responseOf(req, &registryv1.ObjectResponse{Code: http.StatusOK, Body: data}, err)
	case "watch":
		return l.watch(ctx, done, req, e.Entry, info)
	}
	defer done()
	resp, err := e.Write(ctx, &registryv1.WriteRequest{
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
	}, system{})
	return responseOf(req, resp, err)
}

// system is the Gate of loopback writes: the system may do everything, and nothing asks admission.
type system struct{}

func (system) Lifecycle() admission.MutationInterface { return nil }
func (system) Review(context.Context, registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error) {
	return &admissionv1.Verdict{}, nil
}
func (system) Authorize(context.Context, *commonv1.Attributes) (*authzv1.AuthorizeResponse, error) {
	return &authzv1.AuthorizeResponse{Decision: authzv1.Decision_DECISION_ALLOW}, nil
}
func (system) ReviewToken(context.Context, *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error) {
	return nil, errors.New("not asked by the system itself")
}
func (system) Rules(context.Context, *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	return nil, errors.New("not asked by the system itself")
}

func responseOf(req *http.Request, resp *registryv1.ObjectResponse, err error) *http.Response {
	if err != nil {
		return failure(req, err)
	}
	return respond(req, int(resp.Code), resp.Body)
}

func failure(req *http.Request, err error) *http.Response {
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		err = apierrors.NewInternalError(err)
		errors.As(err, &api)
	}
	st := responsewriters.ErrorToAPIStatus(api.(error))
	data, _ := json.Marshal(st)
	return respond(req, int(st.Code), data)
}

func respond(req *http.Request, code int, body []byte) *http.Response {
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

// discovery answers the one thing a policy's validation asks for: what resources a version has.
func (l *Loopback) discovery(req *http.Request, info *request.RequestInfo) (*http.Response, error) {
	gv, err := schema.ParseGroupVersion(strings.TrimPrefix(strings.TrimPrefix(info.Path, "/apis/"), "/api/"))
	if err != nil || gv.Version == "" {
		return failure(req, apierrors.NewNotFound(schema.GroupResource{}, info.Path)), nil
	}
	list := metav1.APIResourceList{
		TypeMeta:     metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"},
		GroupVersion: gv.String(),
	}
	for _, e := range l.registry.Entries() {
		if r := e.Resource; r.Group == gv.Group && r.Version == gv.Version {
			list.APIResources = append(list.APIResources, discovery.ToMetaV1(e))
		}
	}
	data, err := json.Marshal(list)
	if err != nil {
		return nil, err
	}
	return respond(req, http.StatusOK, data), nil
}
