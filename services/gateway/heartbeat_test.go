package gateway

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/discovery"
	commonv1 "watershed.dev/proto/watershed/common/v1"
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
	switch {
	case req.Leaving:
		r.got = append(r.got, "leaves")
	case req.Report:
		r.got = append(r.got, fmt.Sprint("serves ", req.Establishing))
		return &registryv1.GatewaysResponse{}, nil
	default:
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

// The gateway reports the CRDs of its view that are not established. A report does not delay the next heartbeat.
func TestReportsBetweenHeartbeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		registry := &recorder{failed: true}
		h := newHeartbeat(registry, "192.0.2.1", nil, nil)
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{})
		go func() { defer close(ended); h.run(ctx) }()
		synctest.Wait()
		view := func(established bool, revision int64) *discovery.View {
			return discovery.NewView(&registryv1.DiscoveryResponse{Resources: []*registryv1.APIResource{
				{Resource: &commonv1.Resource{Group: "a", Resource: "known"}, CrdRevision: 1},
				{Resource: &commonv1.Resource{Group: "a", Resource: "new"}, CrdRevision: revision, NotEstablished: !established},
			}})
		}
		for _, v := range []*discovery.View{view(false, 2), view(false, 2), view(false, 3), view(true, 4)} {
			time.Sleep(heartbeatPeriod / 5)
			h.serves(v)
			synctest.Wait()
		}
		time.Sleep(heartbeatPeriod/5 + 1)
		cancel()
		<-ended
		if want := []string{"192.0.2.1 false", "serves map[new.a:2]", "serves map[new.a:3]", "serves map[]",
			"192.0.2.1 false", "leaves"}; !slices.Equal(registry.got, want) {
			t.Errorf("%q, not %q", registry.got, want)
		}
		if live, _ := h.live.Get(); live != 3 {
			t.Errorf("%d live gateways, not 3", live)
		}
	})
}

// A report is bounded: it has the newest CRDs.
func TestAReportHasTheNewestCRDs(t *testing.T) {
	m := &registryv1.DiscoveryResponse{}
	for i := range maxEstablishing + 5 {
		m.Resources = append(m.Resources, &registryv1.APIResource{NotEstablished: true, CrdRevision: int64(i),
			Resource: &commonv1.Resource{Group: "a", Resource: fmt.Sprint(i)}})
	}
	h := newHeartbeat(nil, "", nil, nil)
	h.serves(discovery.NewView(m))
	got, _ := h.establishing.Get()
	if oldest := slices.Min(slices.Collect(maps.Values(got))); len(got) != maxEstablishing || oldest != 5 {
		t.Errorf("%d CRDs, the oldest is %d", len(got), oldest)
	}
}
