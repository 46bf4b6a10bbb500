package routing

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// A gateway holds a bounded number of slow requests, with bounded texts and without the names of objects.
func TestSlowRequestsAreBounded(t *testing.T) {
	s := &SlowRequests{}
	trace1 := trace.TraceID{1}
	for i := range 3 * maxSlow {
		ctx := request.WithUser(t.Context(), &user.DefaultInfo{Name: fmt.Sprint(i) + strings.Repeat("x", 1<<20)})
		ctx = trace.ContextWithSpanContext(ctx, trace.NewSpanContext(trace.SpanContextConfig{TraceID: trace1,
			SpanID: trace.SpanID{1}, TraceFlags: trace.FlagsSampled}))
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "/api/v1/secrets/hidden?x=hidden", nil)
		if err != nil {
			t.Fatal(err)
		}
		s.add(req, &request.RequestInfo{Verb: "get", APIGroup: "apps", Resource: "deployments", Subresource: "scale",
			Name: "hidden", Namespace: "hidden"}, http.StatusOK, time.Second)
	}
	all := s.Newest(1000)
	if len(all) != maxSlow || len(all[0].User) > 256 || !strings.HasPrefix(all[0].User, "191x") ||
		!strings.HasPrefix(all[1].User, "190x") || len(s.Newest(2)) != 2 {
		t.Fatalf("%d requests: %.500v", len(all), all)
	}
	all[0].User, all[0].Received = "", time.Time{}
	if got := fmt.Sprint(all[0]); strings.Contains(got, "hidden") || all[0].Trace != trace1.String() ||
		all[0].Resource != "deployments.apps/scale" {
		t.Errorf("%s", got)
	}
}

// A user with many slow requests replaces its own requests, and not the requests of other users.
func TestSlowRequestsOfAUser(t *testing.T) {
	s := &SlowRequests{}
	add := func(name string, code int) {
		ctx := request.WithUser(t.Context(), &user.DefaultInfo{Name: name})
		s.add((&http.Request{}).WithContext(ctx), &request.RequestInfo{}, code, time.Second)
	}
	add("alice", 1)
	for code := range 3 * maxSlow {
		add("mallory", code)
	}
	all := s.Newest(maxSlow)
	if len(all) != maxSlowOfUser+1 || all[0].Code != 3*maxSlow-1 || all[maxSlowOfUser].User != "alice" ||
		all[maxSlowOfUser-1].Code != 3*maxSlow-maxSlowOfUser {
		t.Errorf("%+v", all)
	}
}
