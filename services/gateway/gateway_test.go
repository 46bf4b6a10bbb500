package gateway

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/endpoints/filters"

	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/gateway/delegatedauth"
)

// fakeServices are the services that a gateway calls. A request with the token bob has the user bob, with another token
// an administrator. Requests without a token are anonymous.
type fakeServices struct {
	authnv1.UnimplementedAuthnServer
	authzv1.UnimplementedAuthzServer
	admissionv1.UnimplementedAdmissionServer
	registryv1.UnimplementedObjectsServer
	registryv1.UnimplementedDiscoveryServer
	registryv1.UnimplementedSourceServer
	// unavailable is the name of the service that does not respond.
	unavailable atomic.Value
	// list is called before the watch tier or registry serves a list.
	list func(query string)
	// view changes the discovery response, or returns nil if the registry sends none. startHooks responds to
	// StartHooks.
	view       func(*registryv1.DiscoveryResponse) *registryv1.DiscoveryResponse
	startHooks func() *registryv1.StartHooksResponse
}

func (o *fakeServices) StartHooks(context.Context,
	*registryv1.StartHooksRequest) (*registryv1.StartHooksResponse, error) {
	if o.startHooks == nil {
		return &registryv1.StartHooksResponse{Known: true}, nil
	}
	return o.startHooks(), nil
}

func (o *fakeServices) errFor(name string) error {
	if o.unavailable.Load() == name {
		return status.Error(codes.Unavailable, name+" is away")
	}
	return nil
}

func (o *fakeServices) Authenticate(_ context.Context,
	r *authnv1.AuthenticateRequest) (*authnv1.AuthenticateResponse, error) {
	u := &commonv1.User{Name: "system:anonymous", Groups: []string{"system:unauthenticated"}}
	if r.Headers["Authorization"] != nil {
		u = &commonv1.User{Name: "admin", Groups: []string{"system:masters"}}
	}
	if slices.Contains(r.Headers["Authorization"].GetValues(), "Bearer bob") {
		u = &commonv1.User{Name: "bob", Groups: []string{"system:authenticated"}}
	}
	return &authnv1.AuthenticateResponse{Authenticated: true, User: u}, o.errFor("authn")
}

func (o *fakeServices) ReviewToken(
	context.Context,
	*authnv1.ReviewTokenRequest,
) (*authnv1.AuthenticateResponse, error) {
	return &authnv1.AuthenticateResponse{}, o.errFor("authn")
}

func (o *fakeServices) IssuerDocument(_ context.Context,
	r *authnv1.IssuerDocumentRequest) (*authnv1.IssuerDocumentResponse, error) {
	if r.Path != "/openid/v1/jwks" {
		return nil, status.Error(codes.NotFound, "there is none")
	}
	return &authnv1.IssuerDocumentResponse{
		ContentType:   "application/jwk-set+json",
		Body:          []byte(`{"keys":[]}`),
		MaxAgeSeconds: 3600,
	}, nil
}

func (o *fakeServices) Authorize(_ context.Context, r *authzv1.AuthorizeRequest) (*authzv1.AuthorizeResponse, error) {
	d := authzv1.Decision_DECISION_UNSPECIFIED
	known := slices.Contains([]string{"admin", "bob"}, r.Attributes.User.Name)
	if known || strings.HasPrefix(r.Attributes.Path, "/readyz") {
		d = authzv1.Decision_DECISION_ALLOW
	}
	return &authzv1.AuthorizeResponse{Decision: d}, o.errFor("authz")
}

func (o *fakeServices) Rules(context.Context, *authzv1.RulesRequest) (*authzv1.RulesResponse, error) {
	return &authzv1.RulesResponse{}, o.errFor("authz")
}

func (o *fakeServices) AdmissionRules(_ *admissionv1.AdmissionRulesRequest,
	s grpc.ServerStreamingServer[admissionv1.AdmissionRuleSet]) error {
	if err := o.errFor("admission"); err != nil {
		return err
	}
	if err := s.Send(&admissionv1.AdmissionRuleSet{}); err != nil {
		return err
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (o *fakeServices) Watch(
	_ *registryv1.DiscoveryRequest,
	s grpc.ServerStreamingServer[registryv1.DiscoveryResponse],
) error {
	v := &registryv1.DiscoveryResponse{
		Groups: []*registryv1.Group{{Versions: []string{"v1"}}, {Name: "apps", Versions: []string{"v1"}}},
		Resources: []*registryv1.APIResource{{
			Resource:        &commonv1.Resource{Version: "v1", Resource: "namespaces"},
			Kind:            &commonv1.Kind{Version: "v1", Kind: "Namespace"},
			Verbs:           []string{"get", "list", "watch"},
			StorageResource: "namespaces",
			MediaTypes:      []string{"application/json"},
		}},
		Openapi: map[string]string{"v2": "hash"},
	}
	if o.view != nil {
		v = o.view(v)
	}
	if v != nil {
		if err := s.Send(v); err != nil {
			return err
		}
	}
	<-s.Context().Done()
	return s.Context().Err()
}

func (o *fakeServices) Revision(context.Context, *registryv1.RevisionRequest) (*registryv1.RevisionResponse, error) {
	return &registryv1.RevisionResponse{Revision: 7}, o.errFor("etcd")
}

func (o *fakeServices) Get(context.Context, *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	return &registryv1.ObjectResponse{Code: http.StatusOK, Body: []byte("{}")}, nil
}

func (o *fakeServices) List(r *registryv1.GetRequest, s grpc.ServerStreamingServer[registryv1.ListChunk]) error {
	if o.list != nil {
		o.list(r.Query)
	}
	return s.Send(&registryv1.ListChunk{Data: []byte("{}")})
}

// fakeTier is the watch tier.
type fakeTier struct {
	watchfanoutv1.UnimplementedWatchServer
	services *fakeServices
}

func (t fakeTier) List(_ *watchfanoutv1.ListRequest, s grpc.ServerStreamingServer[watchfanoutv1.ListChunk]) error {
	if err := t.services.errFor("watch tier"); err != nil {
		return err
	}
	if t.services.list != nil {
		t.services.list("")
	}
	return s.Send(&watchfanoutv1.ListChunk{Data: [][]byte{[]byte("{}")}, Size: 2})
}

// newTestGateway returns a gateway that calls o, without its HTTPS server.
func newTestGateway(t *testing.T, o *fakeServices, flags ...string) *Service {
	t.Helper()
	p := rpc.NewInProcess(false)
	authnv1.RegisterAuthnServer(p, o)
	authzv1.RegisterAuthzServer(p, o)
	admissionv1.RegisterAdmissionServer(p, o)
	registryv1.RegisterObjectsServer(p, o)
	registryv1.RegisterDiscoveryServer(p, o)
	registryv1.RegisterSourceServer(p, o)
	watchfanoutv1.RegisterWatchServer(p, fakeTier{services: o})
	conn := p.Client("gateway")
	c := NewConfig()
	fs := pflag.NewFlagSet("gateway", pflag.ContinueOnError)
	c.AddFlags(fs)
	flags = append([]string{"--advertise-address=192.0.2.1", "--enable-priority-and-fairness=false"}, flags...)
	if err := fs.Parse(flags); err != nil {
		t.Fatal(err)
	}
	g, err := New(t.Context(), c, Deps{
		Authn:         authnv1.NewAuthnClient(conn),
		Authz:         authzv1.NewAuthzClient(conn),
		Admission:     admissionv1.NewAdmissionClient(conn),
		Objects:       registryv1.NewObjectsClient(conn),
		Discovery:     registryv1.NewDiscoveryClient(conn),
		Source:        registryv1.NewSourceClient(conn),
		InternalWatch: watchfanoutv1.NewInternalWatchClient(conn),
		Watch:         watchfanoutv1.NewWatchClient(conn),
		Report: func(context.Context, process.Kind) *process.Report {
			return &process.Report{Host: "a", States: map[string]json.RawMessage{}}
		},
		Reports: func(context.Context, process.Kind) []*process.Report { return nil },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); g.watchServices(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	return g
}

// awaitReady waits until a gateway is ready.
func (g *Service) awaitReady(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if err := g.Ready().Wait(ctx); err != nil {
		t.Fatal(err)
	}
}

func (g *Service) doRequest(method, path, token string) (int, string, http.Header) {
	req := httptest.NewRequest(method, path, nil)
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	w := httptest.NewRecorder()
	g.handler.ServeHTTP(w, req)
	return w.Code, w.Body.String(), w.Header()
}

// A request goes to resources, to discovery or to a page of the gateway's own. An anonymous client sees only public
// pages.
func TestRequestsAreRouted(t *testing.T) {
	g := newTestGateway(t, &fakeServices{})
	g.awaitReady(t)
	for _, c := range []struct {
		method, path, token string
		code                int
		says                string
	}{
		{"GET", "/version", "t", 200, `"major"`},
		{"POST", "/version", "t", 405, "does not allow this method"},
		{"GET", "/", "t", 200, `"/apis/apps/v1"`},
		{"GET", "/nowhere", "t", 404, "404 page not found"},
		{"GET", "/api//v1", "t", 404, "could not find the requested resource"},
		{"GET", "/api", "t", 200, "192.0.2.1:6443"},
		{"GET", "/apis", "t", 200, `"apps"`},
		{"GET", "/api/v1", "t", 200, `"namespaces"`},
		{"GET", "/api/v1/namespaces", "t", 200, "{}"},
		{"GET", "/api/v1/namespaces/x", "t", 200, "{}"},
		{"GET", "/api/v1/nothings", "t", 404, "could not find the requested resource"},
		{"GET", "/openid/v1/jwks", "t", 200, `{"keys":[]}`},
		{"GET", "/.well-known/openid-configuration", "t", 404, "404 page not found"},
		{"GET", "/metrics", "t", 200, "apiserver_request_total"},
		{"GET", "/debug/pprof/symbol", "t", 200, "num_symbols"},
		{"GET", "/readyz", "", 200, "ok"},
		{"GET", "/version", "", 403, "system:anonymous"},
	} {
		if code, body, _ := g.doRequest(c.method, c.path, c.token); code != c.code || !strings.Contains(body, c.says) {
			t.Errorf("%s %s: %d %.200s", c.method, c.path, code, body)
		}
	}
	var index struct{ Paths []string }
	if _, body, _ := g.doRequest("GET", "/", "t"); json.Unmarshal([]byte(body), &index) != nil ||
		!slices.IsSorted(index.Paths) {
		t.Errorf("%q", index.Paths)
	}
	if _, _, h := g.doRequest("GET", "/openid/v1/jwks", "t"); h.Get("Cache-Control") != "public, max-age=3600" {
		t.Errorf("%v", h)
	}
}

// /readyz names each service that does not respond. The gateway stays alive without it.
func TestUnavailableServiceIsNamed(t *testing.T) {
	for _, unavailable := range []checkName{checkEtcd, checkAuthn, checkAuthz, checkAdmission} {
		o := &fakeServices{}
		g := newTestGateway(t, o)
		g.awaitReady(t)
		o.unavailable.Store(string(unavailable))
		for _, c := range g.health {
			c.mu.Lock()
			c.checkedAt = time.Time{} // the cached result would be reused
			c.mu.Unlock()
		}
		var failed []checkName
		for name, c := range g.health {
			if c.get(t.Context()) != nil && name != checkEtcdReadiness { // fails with etcd
				failed = append(failed, name)
			}
		}
		if len(failed) != 1 || failed[0] != unavailable {
			t.Errorf("without %s: %q", unavailable, failed)
		}
	}
	o := &fakeServices{}
	o.unavailable.Store("watch tier")
	g := newTestGateway(t, o)
	g.awaitReady(t)
	if code, body, _ := g.doRequest(
		"GET",
		"/readyz/watch-tier",
		"t",
	); code != 500 ||
		!strings.Contains(body, "is away") {
		t.Errorf("%d %s", code, body)
	}
	if code, body, _ := g.doRequest(
		"GET",
		"/readyz?verbose",
		"t",
	); code != 200 ||
		!strings.Contains(body, "[+]discovery ok") {
		t.Errorf("%d %s", code, body)
	}
}

// A gateway is not ready until each required check has succeeded once.
func TestGatewayWaitsForRequiredChecks(t *testing.T) {
	o := &fakeServices{}
	o.unavailable.Store("authz")
	g := newTestGateway(t, o)
	if err := g.Ready().Err(); err == nil {
		t.Error("it is ready without authz")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	g.Ready().OnChange(ctx, func(notReady error) {
		if notReady != nil && strings.HasPrefix(notReady.Error(), "authz: ") && !errors.Is(notReady, errNotResponded) {
			cancel()
		}
	})
	if err := g.Ready().Err(); err == nil || !strings.Contains(err.Error(), "authz is away") {
		t.Error(err)
	}
}

// The gateway advertises the host of --external-hostname or --advertise-address. In a shared process, the second may be
// registry's none.
func TestExternalAddress(t *testing.T) {
	for want, c := range map[string]*Config{
		"192.0.2.2:6443": {AdvertiseAddress: "none"},
		"192.0.2.1:6443": {AdvertiseAddress: "192.0.2.1"},
		"api.test:6443":  {AdvertiseAddress: "none", ExternalHostname: "api.test"},
	} {
		c.Server.BindAddress, c.Server.SecurePort = "192.0.2.2", 6443
		if got := c.externalAddress(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// Without flow control, the requests in flight are counted.
func TestRequestsInFlightAreCounted(t *testing.T) {
	g := newTestGateway(t, &fakeServices{})
	g.awaitReady(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	g.runFlowControl(ctx)
	eventually(t, func() bool {
		_, page, _ := g.doRequest("GET", "/metrics", "t")
		return strings.Contains(page, "\napiserver_current_inflight_requests{")
	})
}

// A gateway does not start if a flag's value is out of range.
func TestBoundsOutOfRangeAreRefused(t *testing.T) {
	for _, flag := range []string{"--min-request-timeout=-1", "--goaway-chance=1", "--max-requests-inflight=-1",
		"--max-watch-rate-per-user=-1"} {
		c := &Config{}
		fs := pflag.NewFlagSet("gateway", pflag.ContinueOnError)
		c.AddFlags(fs)
		if err := fs.Parse([]string{flag}); err != nil {
			t.Fatal(err)
		}
		name, value, _ := strings.Cut(flag, "=")
		if err := c.Validate(); err == nil || !strings.HasPrefix(err.Error(), name) ||
			!strings.Contains(err.Error(), value+": ") {
			t.Errorf("%s: %v", flag, err)
		}
	}
}

// The gateway itself authorizes flow control's watches, also after they are open. authz does not know their user, and
// flow control must not wait for the policies of authz.
func TestFlowControlsWatchesNeedNoAuthz(t *testing.T) {
	g := newTestGateway(t, &fakeServices{})
	authz := &delegatedauth.Authorizer{} // without a client
	config := flowControlClient(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		attrs, err := filters.GetAuthorizerAttributes(req.Context())
		if err != nil || !authz.Reauthorize(req.Context(), attrs) {
			http.Error(w, "the watch may not go on", http.StatusInternalServerError)
		}
		if g.server.ShutdownStagger(req.Context()) != nil {
			http.Error(w, "a shutdown ends the watch", http.StatusInternalServerError)
		}
	}), g.auditor)
	client := &http.Client{Transport: config.Transport}
	for path, code := range map[string]int{
		"/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas?watch=1": http.StatusOK,
		"/api/v1/secrets?watch=1":                                   http.StatusForbidden,
	} {
		resp, err := client.Get("https://gateway.internal" + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != code {
			t.Errorf("%s: %d, not %d", path, resp.StatusCode, code)
		}
	}
}
