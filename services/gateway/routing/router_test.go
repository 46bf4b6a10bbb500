package routing

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/admissionrules"
	"watershed.dev/platform/coalesce"
	"watershed.dev/platform/discovery"
	"watershed.dev/platform/paths"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/turns"
	"watershed.dev/services/gateway/watch"
)

// fakeBackends is a registry and a watch tier. Each response names the backend and the call.
type fakeBackends struct {
	registryv1.UnimplementedObjectsServer
	registryv1.UnimplementedDiscoveryServer
	watchfanoutv1.UnimplementedWatchServer
	tierErr error // the tier's error for lists
	// tierListSize is the size of the tier's lists, by their first chunk.
	tierListSize int64
	// tierLists has a value for each list that the tier serves, if it is not nil.
	tierLists chan struct{}
	// listFunc replaces List of the registry.
	listFunc func(*registryv1.GetRequest, grpc.ServerStreamingServer[registryv1.ListChunk]) error
}

func (b *fakeBackends) Watch(
	_ *registryv1.DiscoveryRequest,
	s grpc.ServerStreamingServer[registryv1.DiscoveryResponse],
) error {
	pods := podsResource()
	pods.Verbs = []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"}
	exec := &registryv1.APIResource{
		Namespaced:     true,
		Resource:       &commonv1.Resource{Version: "v1", Resource: "pods", Subresource: "exec"},
		Kind:           &commonv1.Kind{Version: "v1", Kind: "PodExecOptions"},
		ConnectMethods: []string{"GET", "POST"},
	}
	widgets := &registryv1.APIResource{
		StorageResource: "widgets.example.com",
		Namespaced:      true,
		Unstructured:    true,
		Verbs:           []string{"get", "list", "watch", "create", "update", "patch", "delete", "deletecollection"},
		Resource:        &commonv1.Resource{Group: "example.com", Version: "v1", Resource: "widgets"},
		Kind:            &commonv1.Kind{Group: "example.com", Version: "v1", Kind: "Widget"},
		MediaTypes:      []string{"application/json", "application/yaml", "application/vnd.kubernetes.protobuf"},
	}
	if err := s.Send(&registryv1.DiscoveryResponse{Resources: []*registryv1.APIResource{pods,
		exec, widgets}}); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (b *fakeBackends) Get(_ context.Context, r *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	return &registryv1.ObjectResponse{Code: 200, Body: []byte("registry get " + r.Name)}, nil
}

func (b *fakeBackends) List(r *registryv1.GetRequest, s grpc.ServerStreamingServer[registryv1.ListChunk]) error {
	if b.listFunc != nil {
		return b.listFunc(r, s)
	}
	return s.Send(&registryv1.ListChunk{Data: []byte("registry list " + r.Query)})
}

func (b *fakeBackends) Write(s grpc.BidiStreamingServer[registryv1.WriteCall, registryv1.WriteReply]) error {
	m, err := s.Recv()
	if err != nil {
		return err
	}
	r := m.GetRequest()
	body := "registry " + r.Verb + " " + r.Name + " " + string(r.Body)
	result := &registryv1.ObjectResponse{Code: 201, Body: []byte(body)}
	return s.Send(&registryv1.WriteReply{Reply: &registryv1.WriteReply_Result{Result: result}})
}

// WriteUnary succeeds, unless the body requests a callback or a rejection.
func (b *fakeBackends) WriteUnary(_ context.Context, r *registryv1.WriteRequest) (*registryv1.WriteUnaryReply, error) {
	switch string(r.Body) {
	case "asks":
		return &registryv1.WriteUnaryReply{CallbackRequired: true}, nil
	case "refused":
		err := rpc.ToStatus(apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, r.Name, errors.New("newer")))
		data, _ := proto.Marshal(status.Convert(err).Proto())
		return &registryv1.WriteUnaryReply{Error: data}, nil
	}
	result := &registryv1.ObjectResponse{Code: 200, Body: []byte("direct " + r.Verb + " " + r.Name)}
	return &registryv1.WriteUnaryReply{Result: result}, nil
}

// A write without callbacks is a unary call. Any other write is a stream, also if the unary call requires a callback.
func TestWritesWithCallbacks(t *testing.T) {
	const pods = "/api/v1/namespaces/x/pods"
	r := newTestRouter(t, &fakeBackends{})
	if code, got := doRequest(
		t,
		r,
		"PUT",
		pods+"/a",
		"plain",
	); got != "registry update a plain" { // there are no admission rules
		t.Errorf("%d %s", code, got)
	}
	rules := &admissionv1.AdmissionRuleSet{
		Admit: []*admissionv1.AdmissionRule{
			{Resource: "pods", Operations: []admissionv1.Operation{admissionv1.Operation_OPERATION_CREATE}},
			{Group: "*", Resource: "*", NamespaceLifecycleOnly: true, Operations: allOperations},
		},
		Validate: []*admissionv1.AdmissionRule{{
			Group:      "example.com",
			Resource:   "*",
			Operations: []admissionv1.Operation{admissionv1.Operation_OPERATION_DELETE},
		}},
	}
	r.AdmissionRules.current.Store(&receivedRules{rules, time.Now().Add(-admissionrules.Lease - time.Second)})
	if code, got := doRequest(t, r, "DELETE", pods+"/a", ""); got != "registry delete a " { // the rules have expired
		t.Errorf("%d %s", code, got)
	}
	r.AdmissionRules.current.Store(&receivedRules{rules, time.Now()})
	for _, c := range []struct{ method, path, body, want string }{
		{"POST", pods, "plain", "registry create  plain"},
		{"PUT", pods + "/a", "plain", "registry update a plain"}, // it may create
		{"DELETE", pods + "/a", "", "direct delete a"},
		{"DELETE", pods, "", "registry deletecollection  "},
		{"POST", "/apis/example.com/v1/namespaces/x/widgets", "plain", "direct create "},
		{"POST", "/apis/example.com/v1/namespaces/x/widgets", "asks", "registry create  asks"},
		{"PUT", "/apis/example.com/v1/namespaces/x/widgets/w", "refused",
			`409 Conflict: Operation cannot be fulfilled on pods "w": newer`},
		{"DELETE", "/apis/example.com/v1/namespaces/x/widgets/w", "", "registry delete w "},
	} {
		if code, got := doRequest(
			t,
			r,
			c.method,
			c.path,
			c.body,
		); !strings.Contains(
			fmt.Sprint(code, " ", got),
			c.want,
		) {
			t.Errorf("%s %s %s: %d %s", c.method, c.path, c.body, code, got)
		}
	}
}

// fakeTier is the watch tier of fakeBackends. It needs its own type because List differs.
type fakeTier struct {
	watchfanoutv1.UnimplementedWatchServer
	*fakeBackends
}

func (t fakeTier) Watch(r *watchfanoutv1.WatchRequest, s grpc.ServerStreamingServer[watchfanoutv1.WatchFrame]) error {
	return t.UnimplementedWatchServer.Watch(r, s)
}

func (t fakeTier) List(r *watchfanoutv1.ListRequest, s grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	if t.tierErr != nil {
		return t.tierErr
	}
	if t.tierLists != nil {
		t.tierLists <- struct{}{}
	}
	return s.Send(&watchfanoutv1.ListChunk{
		Data: [][]byte{[]byte("tier list "), []byte(r.Query.LabelSelector)},
		Size: t.tierListSize,
	})
}

// newTestRouter returns a router for b.
func newTestRouter(t *testing.T, b *fakeBackends) *Router {
	t.Helper()
	p := rpc.NewInProcess(false)
	registryv1.RegisterObjectsServer(p, b)
	registryv1.RegisterDiscoveryServer(p, b)
	watchfanoutv1.RegisterWatchServer(p, fakeTier{fakeBackends: b})
	conn := p.Client("gateway")
	watches := &watch.Hub{Config: &watch.Config{}}
	lists := func() *coalesce.Group[[]byte] { return &coalesce.Group[[]byte]{Limit: 1, Timeout: time.Minute} }
	r := &Router{
		Discovery:      &discovery.Watcher{Registry: registryv1.NewDiscoveryClient(conn)},
		AdmissionRules: &AdmissionRules{Client: admissionv1.NewAdmissionClient(conn)},
		Objects:        registryv1.NewObjectsClient(conn),
		Tier:           Source{watchfanoutv1.NewWatchClient(conn), watches},
		Lists:          NewListGroups(lists),
		PriorityLists:  NewListGroups(lists),
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); r.Discovery.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	for until := time.Now().Add(2 * time.Minute); r.Discovery.View() == nil; time.Sleep(time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("registry sends no resources")
		}
	}
	return r
}

func doRequest(t *testing.T, r *Router, method, path, body string, headers ...string) (int, string) {
	t.Helper()
	req := httptest.NewRequest(method, path, strings.NewReader(body))
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		t.Fatal(err)
	}
	ctx := request.WithRequestInfo(request.WithUser(req.Context(), &user.DefaultInfo{Name: "bob"}), info)
	w := httptest.NewRecorder()
	r.ServeHTTP(w, req.WithContext(ctx))
	data, _ := io.ReadAll(w.Result().Body)
	var s metav1.Status
	if json.Unmarshal(data, &s) == nil && s.Status == metav1.StatusFailure {
		return w.Code, string(s.Reason) + ": " + s.Message
	}
	return w.Code, string(data)
}

// A request goes to the service that serves it. If none does, the error has the text of kube-apiserver's web framework
// or CRD handler.
func TestRequestsAreRouted(t *testing.T) {
	r := newTestRouter(t, &fakeBackends{})
	const pods, widgets = "/api/v1/namespaces/x/pods", "/apis/example.com/v1/namespaces/x/widgets"
	for _, x := range []struct {
		method, path string
		headers      []string
		code         int
		has          string
	}{
		{"GET", pods + "/a", nil, 200, "registry get a"},
		{"GET", pods + "?labelSelector=a%3Db", nil, 200, "tier list a=b"},
		{"GET", pods + "?pretty=true", nil, 200, "registry list pretty=true"},
		{"GET", pods + "?fieldSelector=none%3Dx", nil, 200, "registry list fieldSelector"}, // it has the error text
		{"GET", pods, []string{"Accept", "application/yaml"}, 200, "registry list"},
		{"GET", pods + "?limit=x", nil, 400, "BadRequest: "},
		{"GET", pods + "?resourceVersionMatch=Exact", nil, 422, "Invalid: ListOptions"},
		{"GET", pods, []string{"Accept", "text/html"}, 406, "406: Not Acceptable"},
		{"HEAD", pods + "/a", nil, 405, ""},
		{"POST", pods, nil, 201, "registry create  body"},
		{"PUT", pods + "/a", nil, 201, "registry update a body"},
		{"PUT", pods, nil, 405, "MethodNotAllowed: the server does not allow this method"},
		{"POST", pods + "/a", nil, 405, "MethodNotAllowed: the server does not allow this method"},
		{"PATCH", pods + "/a", []string{"Content-Type", "text/plain"}, 415, "415: Unsupported Media Type"},
		{"PATCH", pods + "/a", []string{"Content-Type", "application/strategic-merge-patch+json"},
			201, "registry patch a"},
		{"DELETE", pods, nil, 201, "registry deletecollection"},
		{"DELETE", "/api/v1/pods", nil, 405, "MethodNotAllowed: the server does not allow this method"},
		{"PUT", pods + "/a/exec", nil, 405, "MethodNotAllowed: the server does not allow this method"},
		{"GET", pods + "/a/none", nil, 404, "NotFound: the server could not find the requested resource"},
		{"GET", "/api/v1/nones", nil, 404, "NotFound: the server could not find the requested resource"},
		{"GET", "/apis/none/v1/nones", nil, 404, "404 page not found\n"},
		{"GET", widgets + "/a", nil, 200, "registry get a"},
		{"HEAD", widgets + "/a", nil, 200, ""},
		{"GET", widgets + "/a/none", nil, 404, `NotFound: widgets.example.com "a" not found`},
		{"PATCH", widgets + "/a", []string{"Content-Type", "application/strategic-merge-patch+json"}, 415,
			"UnsupportedMediaType: the body of the request was in an unknown format"},
		{"GET", widgets, []string{"Accept", "application/vnd.kubernetes.protobuf"}, 406, "NotAcceptable"},
		{"GET", "/apis/example.com/v1/widgets/a", nil, 404, "404 page not found\n"},
	} {
		code, body := doRequest(t, r, x.method, x.path, "body", x.headers...)
		if code != x.code || !strings.Contains(body, x.has) {
			t.Errorf("%s %s %q: %d %.200s", x.method, x.path, x.headers, code, body)
		}
	}
}

// Registry serves a list that the watch tier does not hold or cannot serve. The client receives an API error of the
// tier.
func TestListsFallBackToRegistry(t *testing.T) {
	for name, x := range map[string]struct {
		err  error
		code int
		has  string
	}{
		"not held":      {status.Error(codes.FailedPrecondition, "not held here"), 200, "registry list"},
		"unavailable":   {status.Error(codes.Unavailable, "away"), 200, "registry list"},
		"too large":     {status.Error(codes.ResourceExhausted, "a message of 70 MB"), 200, "registry list"},
		"an API error":  {rpc.ToStatus(errStarting()), 503, "ServiceUnavailable"},
		"not permitted": {status.Error(codes.PermissionDenied, "no"), 500, ""},
	} {
		if code, body := doRequest(
			t,
			newTestRouter(t, &fakeBackends{tierErr: x.err}),
			"GET",
			"/api/v1/pods",
			"",
		); code != x.code ||
			!strings.Contains(body, x.has) {
			t.Errorf("%s: %d %.200s", name, code, body)
		}
	}
}

// A long list waits for a turn: for its source's work if it is known to be long, and for its response otherwise.
func TestLongListsTakeTurns(t *testing.T) {
	for name, x := range map[string]struct {
		known, sent      int64
		atSource, inTurn bool
	}{
		"short":              {0, turns.LongBytes, true, false},
		"long":               {turns.LongBytes + 1, turns.LongBytes + 1, false, true},
		"long and not known": {0, turns.LongBytes + 1, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			tierLists := make(chan struct{}, 1)
			r := newTestRouter(t, &fakeBackends{tierListSize: x.sent, tierLists: tierLists})
			r.ListSize = func(*http.Request) int64 { return x.known }
			all := turns.New(1, time.Hour)
			r.Tier.Watches.Turns = all
			other, ctx := all.NewTurn(t.Context(), "other")
			if err := other.Take(ctx); err != nil {
				t.Fatal(err)
			}
			ended := make(chan string, 1)
			go func() {
				_, body := doRequest(t, r, "GET", "/api/v1/pods", "")
				ended <- body
			}()
			if x.atSource {
				<-tierLists
			}
			if x.inTurn {
				for all.Waiting() == 0 {
					time.Sleep(time.Millisecond) // between polls: nothing signals that a response waits
				}
				if len(ended)+len(tierLists) > 0 {
					t.Error("the list does not wait")
				}
				other.Yield()
			}
			if body := <-ended; body != "tier list " {
				t.Errorf("%q", body)
			}
		})
	}
}

// A client receives 503 until registry has sent the served resources.
func TestNotReadyWithoutDiscovery(t *testing.T) {
	if code, body := doRequest(t, &Router{Discovery: &discovery.Watcher{}}, "GET", "/api/v1/pods", ""); code != 503 ||
		!strings.Contains(body, "starting") {
		t.Errorf("%d %s", code, body)
	}
}
