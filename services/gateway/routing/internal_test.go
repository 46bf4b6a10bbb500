package routing

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"net/url"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/client-go/kubernetes/scheme"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/paths"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/delegatedauth"
	"watershed.dev/services/gateway/watch"
)

// Registry serves the lists and watches of authn, authz and admission.
func TestInternalReadsGoToRegistry(t *testing.T) {
	var nowhere grpc.ClientConnInterface
	r := &Router{
		Tier:     Source{watchfanoutv1.NewWatchClient(nowhere), &watch.Hub{}},
		Internal: Source{watchfanoutv1.NewInternalWatchClient(nowhere), &watch.Hub{}},
	}
	e := podsResource()
	e.Verbs = []string{"get", "list", "watch"}
	for group, internal := range map[string]bool{
		identity.ServicesGroup: true,
		"system:masters":       false,
		"system:nodes":         false,
	} {
		c := &requestContext{
			router:      r,
			req:         &http.Request{URL: &url.URL{}},
			info:        &request.RequestInfo{Verb: "watch"},
			apiResource: e,
			dialect:     builtIn{},
			user:        &commonv1.User{Name: "u", Groups: []string{"a", group}},
			out:         &registryv1.Output{MediaType: "application/json"},
		}
		p, err := c.plan()
		if err != nil || (p.source == &r.Internal) != internal || (p.source == &r.Tier) == internal {
			t.Errorf("%s: lists and watches are answered by registry: %v, %v", group, p.source == &r.Internal, err)
		}
	}
}

// The name of a Namespace is not its namespace, also in the deprecated path of a watch (kubernetes #125133).
func TestTheNamespaceOfARequest(t *testing.T) {
	for path, want := range map[string]string{
		"/api/v1/namespaces/x":                       "",
		"/api/v1/watch/namespaces/x":                 "",
		"/api/v1/namespaces/x?watch=1":               "",
		"/api/v1/watch/nodes/x":                      "",
		"/api/v1/watch/namespaces/x/pods":            "x",
		"/api/v1/watch/namespaces/x/pods/namespaces": "x",
	} {
		info, err := paths.RequestInfo.NewRequestInfo(httptest.NewRequest("GET", path, nil))
		if err != nil {
			t.Fatal(err)
		}
		c := &requestContext{info: info, apiResource: &registryv1.APIResource{Namespaced: info.Resource == "pods"}}
		if got := c.namespace(); got != want {
			t.Errorf("%s: %q", path, got)
		}
	}
}

// The error of a write that may be stored has no Retry-After, with which client-go would send it again, if a second
// write could have a second effect. An API error of registry keeps it.
func TestAWriteIsNotRepeatedWithASecondEffect(t *testing.T) {
	const protobuf = runtime.ContentTypeProtobuf
	inProtobuf := func(m metav1.ObjectMeta) string {
		info, _ := runtime.SerializerInfoForMediaType(scheme.Codecs.SupportedMediaTypes(), protobuf)
		data, err := runtime.Encode(scheme.Codecs.EncoderForVersion(info.Serializer, corev1.SchemeGroupVersion),
			&corev1.Pod{ObjectMeta: m})
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	const twoGeneratedNames = `{"metadata":{"generateName":"a-","generatename":""}}`
	lost := status.Error(codes.Unavailable, "error reading from server: EOF")
	for name, c := range map[string]struct {
		verb, contentType, body string
		err                     error
		retryAfter              int
	}{
		"a deletion":                   {"delete", "application/json", `{"gracePeriodSeconds":1}`, lost, 0},
		"a deletion without options":   {"delete", "", "", lost, 0},
		"a deletion of no UID":         {"delete", "application/json", `{"preconditions":{}}`, lost, 0},
		"a deletion of a UID":          {"delete", "application/json", `{"preconditions":{"uid":"u"}}`, lost, 1},
		"a deletion of a collection":   {"deletecollection", "application/json", `{"preconditions":{}}`, lost, 0},
		"a name":                       {"create", "application/json; charset=utf-8", `{"metadata":{"name":"a"}}`, lost, 1},
		"two generated names":          {"create", "application/json", twoGeneratedNames, lost, 0},
		"a generated name":             {"create", "application/json", `{"metadata":{"generateName":"a-"}}`, lost, 0},
		"a name in protobuf":           {"create", protobuf, inProtobuf(metav1.ObjectMeta{Name: "a"}), lost, 1},
		"a generated name in protobuf": {"create", protobuf, inProtobuf(metav1.ObjectMeta{GenerateName: "a-"}), lost, 0},
		"no protobuf":                  {"create", protobuf, "{}", lost, 0},
		"an eviction":                  {"create", "application/json", `{"metadata":{"name":"a"}}`, lost, 0},
		"YAML":                         {"create", "application/yaml", "metadata: {name: a}", lost, 0},
		"an update":                    {"update", protobuf, "", lost, 1},
		"a merge patch":                {"patch", "application/merge-patch+json", "{}", lost, 1},
		"a JSON Patch":                 {"patch", "application/json-patch+json", "[]", lost, 0},
		"an error of the API": {"patch", "application/json-patch+json", "[]",
			rpc.ToStatus(apierrors.NewTooManyRequests("busy", 3)), 3},
	} {
		r := &registryv1.WriteRequest{Verb: c.verb, ContentType: c.contentType, Body: []byte(c.body)}
		if name == "an eviction" {
			r.Resource = &commonv1.Resource{Version: "v1", Resource: "pods", Subresource: "eviction"}
		}
		err := writeError(r, c.err)
		seconds, _ := apierrors.SuggestsClientDelay(err)
		if seconds != c.retryAfter || errors.Is(c.err, lost) && !apierrors.IsServiceUnavailable(err) {
			t.Errorf("%s: %v, retry after %d s", name, err, seconds)
		}
	}
}

// lostAuthz is authz without a process.
type lostAuthz struct{ authzv1.AuthzClient }

func (lostAuthz) Authorize(context.Context, *authzv1.AuthorizeRequest, ...grpc.CallOption) (*authzv1.AuthorizeResponse,
	error) {
	return nil, status.Error(codes.Unavailable, "connection refused")
}

// callbackWrite is a Write stream whose registry asks for a decision, and returns the gateway's answer as the result.
type callbackWrite struct {
	grpc.ClientStream
	answer *registryv1.WriteCall
	// rejects: registry rejects the write then.
	rejects bool
}

func (s *callbackWrite) Send(m *registryv1.WriteCall) error { s.answer = m; return nil }

func (s *callbackWrite) Recv() (*registryv1.WriteReply, error) {
	if s.answer.GetRequest() != nil {
		return &registryv1.WriteReply{Reply: &registryv1.WriteReply_Authorization{}}, nil
	}
	if s.rejects {
		return nil, rpc.ToStatus(apierrors.NewForbidden(schema.GroupResource{Resource: "roles"}, "x", nil))
	}
	result := &registryv1.ObjectResponse{Body: []byte(s.answer.GetAuthorization().GetError())}
	return &registryv1.WriteReply{Reply: &registryv1.WriteReply_Result{Result: result}}, nil
}

// A client may cache the answer of a review. Without authz, a review is 503 with Retry-After. So is another write that
// registry rejects without a decision.
func TestAReviewFailsWithoutAuthz(t *testing.T) {
	r := &Router{Authorizer: &delegatedauth.Authorizer{Client: lostAuthz{}}}
	call := func(group string, rejects bool) (*registryv1.WriteReply, error) {
		c := &requestContext{
			router:      r,
			req:         httptest.NewRequest("POST", "/", nil),
			apiResource: &registryv1.APIResource{Resource: &commonv1.Resource{Group: group}},
		}
		return c.callWithCallbacks(&registryv1.WriteRequest{Verb: "create"},
			func(context.Context, ...grpc.CallOption) (callbackStream, error) {
				return &callbackWrite{rejects: rejects}, nil
			})
	}
	for _, group := range reviewGroups {
		if _, err := call(group, false); !apierrors.IsServiceUnavailable(err) {
			t.Errorf("%s: %v", group, err)
		} else if _, retries := apierrors.SuggestsClientDelay(err); !retries {
			t.Errorf("%s: clients do not send the review again: %v", group, err)
		}
	}
	if _, err := call("rbac.authorization.k8s.io", true); !apierrors.IsServiceUnavailable(err) {
		t.Errorf("a write that registry rejects for want of a decision: %v", err)
	}
	reply, err := call("rbac.authorization.k8s.io", false)
	if err != nil || len(reply.GetResult().GetBody()) == 0 {
		t.Errorf("registry does not learn of the error: %v, %v", reply, err)
	}
}

// admissionCalls records the affinities of its calls.
type admissionCalls struct {
	admissionv1.AdmissionClient
	affinities []string
}

func (a *admissionCalls) Admit(ctx context.Context, _ *admissionv1.Review, _ ...grpc.CallOption) (
	*admissionv1.Verdict, error) {
	a.affinities = append(a.affinities, rpc.AffinityOf(ctx))
	return &admissionv1.Verdict{}, nil
}

func (a *admissionCalls) Validate(ctx context.Context, r *admissionv1.Review, _ ...grpc.CallOption) (
	*admissionv1.Verdict, error) {
	return a.Admit(ctx, r)
}

// The reviews of a namespace prefer the same replica of admission. Other reviews prefer none.
func TestReviewsOfANamespaceShareAReplica(t *testing.T) {
	calls := &admissionCalls{}
	c := &requestContext{router: &Router{Admission: calls}}
	for _, q := range []*registryv1.AdmissionCallback{
		{Review: &admissionv1.Review{Namespace: "x", Name: "a"}, Phase: registryv1.Phase_PHASE_ADMIT},
		{Review: &admissionv1.Review{Namespace: "x", Name: "b"}},
		{Review: &admissionv1.Review{Namespace: "y", Name: "a"}},
		{Review: &admissionv1.Review{Name: "a"}},
	} {
		c.reviewAdmission(t.Context(), q)
	}
	a := calls.affinities
	if len(a) != 4 || a[0] == "" || a[0] != a[1] || a[1] == a[2] || a[3] != "" {
		t.Errorf("the affinities are %q", a)
	}
}
