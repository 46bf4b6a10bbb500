package routing

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"watershed.dev/platform/paths"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/telemetry/telemetrytest"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// slowObjects is a registry with slow lists.
type slowObjects struct{ registryv1.ObjectsClient }

func (o slowObjects) List(ctx context.Context, r *registryv1.GetRequest, opts ...grpc.CallOption) (
	grpc.ServerStreamingClient[registryv1.ListChunk], error) {
	time.Sleep(telemetry.SlowRequest)
	return o.ObjectsClient.List(ctx, r, opts...)
}

// A list that registry serves, which other requests may share, is a step of its request.
func TestASharedListIsAStepOfItsRequest(t *testing.T) {
	if !telemetrytest.InProcessOfItsOwn(t) {
		return
	}
	var out telemetrytest.Buffer
	if err := (&telemetry.Options{Verbosity: telemetry.StepsVerbosity}).StartLogs("gateway", &out); err != nil {
		t.Fatal(err)
	}
	r := newTestRouter(t, &fakeBackends{tierErr: status.Error(codes.FailedPrecondition, "not held here")})
	r.Objects = slowObjects{r.Objects}
	req := httptest.NewRequest(http.MethodGet, "/api/v1/pods", nil)
	info, err := paths.RequestInfo.NewRequestInfo(req)
	if err != nil {
		t.Fatal(err)
	}
	ctx := request.WithRequestInfo(request.WithUser(req.Context(), &user.DefaultInfo{Name: "bob"}), info)
	ctx, steps := telemetry.StartSteps(ctx, "List")
	r.ServeHTTP(httptest.NewRecorder(), req.WithContext(ctx))
	steps.End()
	if !strings.Contains(out.String(), `---\"/watershed.registry.v1.Objects/List\"`) {
		t.Errorf("no step: %s", &out)
	}
}
