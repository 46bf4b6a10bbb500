package gateway

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// recorder is a registry that records heartbeats and counts three gateways, after a first failure.
type recorder struct {
	registryv1.DiscoveryClient
	got    []string
	failed bool
}

func (r *recorder) Gateways(_ context.Context, req *registryv1.GatewaysRequest,
	_ ...grpc.CallOption) (*registryv1.GatewaysResponse, error) {
	if !r.failed {
		r.failed = true
		return nil, errors.New("not yet")
	}
	if req.Leaving {
		r.got = append(r.got, "leaves")
	} else {
		r.got = append(r.got, fmt.Sprint(req.AdvertiseAddress, " ", req.Accepting))
	}
	return &registryv1.GatewaysResponse{Alive: 3}, nil
}

// A gateway's address is an endpoint only while the gateway accepts connections. The gateway counts until it has ended.
func TestHeartbeatOfAGatewaysLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry, accepting, draining := &recorder{}, make(chan struct{}), make(chan struct{})
		h := newHeartbeat(registry, "192.0.2.1", accepting, draining)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); h.run(ctx) }()
		synctest.Wait()
		if h.counted() {
			t.Error("the gateway is counted after a failed call")
		}
		time.Sleep(heartbeatRetry + 1)
		close(accepting)
		synctest.Wait()
		time.Sleep(heartbeatPeriod + 1)
		close(draining)
		synctest.Wait()
		cancel()
		<-ended
		if want := []string{"192.0.2.1 false", "192.0.2.1 true", "192.0.2.1 true", "192.0.2.1 false",
			"leaves"}; !slices.Equal(registry.got, want) {
			t.Errorf("%q, not %q", registry.got, want)
		}
		if live, _ := h.live.Get(); live != 3 {
			t.Errorf("%d live gateways, not 3", live)
		}
	})
}
