package server

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/klog/v2"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/telemetry/telemetrytest"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/gateway/audit"
	"watershed.dev/services/gateway/delegatedauth"
)

// slowRegistry responds after a delay.
type slowRegistry struct {
	registryv1.UnimplementedObjectsServer
	delay time.Duration
}

func (s *slowRegistry) Get(ctx context.Context, _ *registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
	telemetry.AddSpanEvent(ctx, "read from etcd", nil)
	time.Sleep(s.delay)
	return &registryv1.ObjectResponse{}, nil
}

func (s *slowRegistry) List(_ *registryv1.GetRequest, stream grpc.ServerStreamingServer[registryv1.ListChunk]) error {
	time.Sleep(s.delay)
	return stream.Send(&registryv1.ListChunk{})
}

// A slow request is logged with the filters and the calls that it passed, and the service logs its slow call with the
// same audit ID.
func TestASlowRequestIsLoggedWithItsSteps(t *testing.T) {
	if !telemetrytest.InProcessOfItsOwn(t) {
		return
	}
	before := slog.Default()
	defer func() {
		_ = (&telemetry.Options{}).StartLogs("gateway", io.Discard)
		klog.ClearLogger()
		slog.SetDefault(before)
	}()
	for _, c := range []struct {
		verbosity int
		delay     time.Duration
		lines     int
	}{{2, time.Second, 3}, {2, 400 * time.Millisecond, 1}, {2, 100 * time.Millisecond, 0}, {1, time.Second, 0}} {
		synctest.Test(t, func(t *testing.T) {
			var out strings.Builder
			if err := (&telemetry.Options{Verbosity: c.verbosity}).StartLogs("gateway", &out); err != nil {
				t.Fatal(err)
			}
			services := rpc.NewInProcess(false)
			registryv1.RegisterObjectsServer(services, &slowRegistry{delay: c.delay})
			client := registryv1.NewObjectsClient(rpc.WithSteps(services.Client("gateway")))
			api := http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				if _, err := client.Get(req.Context(), &registryv1.GetRequest{}); err != nil {
					t.Error(err)
				}
				stream, err := client.List(req.Context(), &registryv1.GetRequest{})
				if err != nil {
					t.Error(err)
					return
				}
				if _, err := stream.Recv(); err != nil {
					t.Error(err)
				}
			})
			h := withFilter("authorization", api, func(h http.Handler) http.Handler { return h })
			h = genericapifilters.WithAuditInit(genericapifilters.WithRequestInfo(withSteps(h), paths.RequestInfo))
			req := httptest.NewRequest(http.MethodGet, "/api/v1/namespaces/default/pods/x", nil)
			req.Header.Set("Audit-ID", "the-id")
			h.ServeHTTP(httptest.NewRecorder(), req)
			synctest.Wait()
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if lines[0] == "" {
				lines = nil
			}
			if len(lines) != c.lines {
				t.Fatalf("%+v: %d lines: %s", c, len(lines), &out)
			}
			if c.lines == 0 {
				return
			}
			first := `: \"Get\" audit-id:the-id,client:192.0.2.1:1234,resource:pods,`
			i := slices.IndexFunc(lines, func(line string) bool { return strings.Contains(line, first) })
			if i < 0 {
				t.Fatalf("%+v: no %s: %s", c, first, &out)
			}
			request := lines[i] // the list's line may be before or after it
			calls := slices.Delete(lines, i, i+1)
			for _, part := range []string{
				`---\"/watershed.registry.v1.Objects/Get\"`,
				`---\"/watershed.registry.v1.Objects/List\"`,
			} {
				if !strings.Contains(request, part) {
					t.Errorf("%+v: no %s in %s", c, part, request)
				}
			}
			for _, call := range calls {
				if !strings.Contains(call, `: \"/watershed.registry.v1.Objects/`) ||
					!strings.Contains(call, `audit-id:the-id `) {
					t.Errorf("%+v: %s", c, call)
				}
			}
		})
	}
}

// lateAuthn makes its request slow and ends it, and responds after the request has a response.
type lateAuthn struct {
	authnv1.UnimplementedAuthnServer
	end       context.CancelFunc
	responded chan struct{}
}

func (a *lateAuthn) Authenticate(ctx context.Context, _ *authnv1.AuthenticateRequest) (*authnv1.AuthenticateResponse,
	error) {
	time.Sleep(telemetry.SlowRequest)
	a.end()
	<-a.responded
	return nil, ctx.Err()
}

// A request that ends during a call, because its client has left, is logged with the call.
func TestARequestThatEndsDuringACallIsLoggedWithTheCall(t *testing.T) {
	if !telemetrytest.InProcessOfItsOwn(t) {
		return
	}
	var out telemetrytest.Buffer
	if err := (&telemetry.Options{Verbosity: telemetry.StepsVerbosity}).StartLogs("gateway", &out); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	authn := &lateAuthn{end: cancel, responded: make(chan struct{})}
	services := rpc.NewInProcess(false)
	authnv1.RegisterAuthnServer(services, authn)
	client := authnv1.NewAuthnClient(rpc.WithSteps(services.Client("gateway")))
	h := NewServer(defaults(t)).BuildHandlerChain(http.NotFoundHandler(), ChainConfig{
		Authn:       delegatedauth.NewAuthenticator(client, nil, nil),
		Auditor:     &audit.Auditor{},
		MetricsInfo: unchangedInfo,
	})
	req := httptest.NewRequestWithContext(ctx, http.MethodGet, "/api/v1/pods", nil)
	req.Header.Set("Authorization", "Bearer token")
	h.ServeHTTP(httptest.NewRecorder(), req)
	close(authn.responded)
	eventually(t, "a line names the call", func() bool {
		for line := range strings.Lines(out.String()) {
			if strings.Contains(line, `: \"List\" audit-id:`) &&
				strings.Contains(line, `---\"/watershed.authn.v1.Authn/Authenticate\"`) {
				return true
			}
		}
		return false
	})
}
