package gateway

import (
	"context"
	"testing"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
)

// waits is a connection that records the bound of each call's wait for a ready replica, by method.
type waits struct {
	grpc.ClientConnInterface
	bounds map[string]time.Duration
}

func (w *waits) Invoke(ctx context.Context, method string, _, _ any, _ ...grpc.CallOption) error {
	w.bounds[method] = rpc.MaxWaitOf(ctx)
	return nil
}

// Without a ready replica of authn, authz or admission, a request fails before the deadline of a webhook.
func TestCallsThatDecideAreBounded(t *testing.T) {
	w := &waits{bounds: map[string]time.Duration{}}
	d, err := dial(&process.Deps{Dial: func(string) (grpc.ClientConnInterface, error) { return w, nil }})
	if err != nil {
		t.Fatal(err)
	}
	_, _ = d.Authn.Authenticate(t.Context(), nil)
	_, _ = d.Authz.Authorize(t.Context(), nil)
	_, _ = d.Admission.Admit(t.Context(), nil)
	_, _ = d.Admission.Validate(rpc.WithAffinity(t.Context(), "admission/x"), nil)
	if len(w.bounds) != 4 {
		t.Errorf("the methods are %v", w.bounds)
	}
	for method, bound := range w.bounds {
		if bound != maxWait {
			t.Errorf("%s waits %v for a ready replica", method, bound)
		}
	}
}
