package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/resolver"
)

// A service has at most 10,000 endpoints. A larger set is rejected.
func TestEndpointsAreBounded(t *testing.T) {
	of := func(n int) *endpoint.ClusterLoadAssignment {
		l := &endpoint.LocalityLbEndpoints{}
		for i := range n {
			l.LbEndpoints = append(l.LbEndpoints, &endpoint.LbEndpoint{
				HostIdentifier: &endpoint.LbEndpoint_Endpoint{Endpoint: &endpoint.Endpoint{Address: &core.Address{
					Address: &core.Address_Pipe{Pipe: &core.Pipe{Path: fmt.Sprintf("/run/%d", i)}},
				}}},
			})
		}
		return &endpoint.ClusterLoadAssignment{Endpoints: []*endpoint.LocalityLbEndpoints{l}}
	}
	if all, err := addressesOf(of(10_000)); err != nil || len(all) != 10_000 {
		t.Errorf("%d endpoints, %v", len(all), err)
	}
	if _, err := addressesOf(of(10_001)); err == nil {
		t.Error("10,001 endpoints are accepted")
	}
}

// Clients without an xDS server try all servers in rotation, with growing delays, and log each different error once per
// server. The first endpoints reset the delays and the log. Clients begin with different servers.
func TestStreamsBackOff(t *testing.T) {
	var log bytes.Buffer
	before := slog.Default()
	slog.SetDefault(slog.New(slog.NewTextHandler(&log, nil)))
	defer slog.SetDefault(before)
	x := &XDS{config: XDSConfig{Servers: []string{"a", "b"}}}
	const last = 20
	begins := map[string]bool{}
	for len(begins) < 2 {
		log.Reset()
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			var servers string
			var delays []time.Duration
			ended := time.Now()
			x.runStreams(ctx, func(_ context.Context, server string) (bool, error) {
				servers += server
				delays = append(delays, time.Since(ended))
				ended = time.Now()
				if len(delays) == last {
					cancel()
				}
				return len(delays) == last/2, errors.New("refused")
			})
			begins[servers[:1]] = true
			if servers != strings.Repeat(servers[:2], last/2) || servers[0] == servers[1] {
				t.Errorf("streams to %s", servers)
			}
			for i, want := 1, 200*time.Millisecond; i < last; i++ {
				if i == last/2 {
					want = 200 * time.Millisecond
				}
				if delays[i] < want || delays[i] > want*6/5 {
					t.Errorf("delay %d is %v, want %v and up to a fifth", i, delays[i], want)
				}
				want = min(2*want, 5*time.Second)
			}
		})
		if n := strings.Count(log.String(), "refused"); n != 4 { // two servers, before and after endpoints
			t.Errorf("%d lines:\n%s", n, log.String())
		}
	}
}

// brokenStream receives responses, and fails after the first request.
type brokenStream struct {
	discovery.AggregatedDiscoveryService_StreamAggregatedResourcesClient
	requests int
}

func (s *brokenStream) Send(*discovery.DiscoveryRequest) error {
	if s.requests++; s.requests > 1 {
		return io.EOF
	}
	return nil
}

func (*brokenStream) Recv() (*discovery.DiscoveryResponse, error) {
	return &discovery.DiscoveryResponse{TypeUrl: endpointType}, nil
}

// A stream that fails while responses are left ends, so that the client opens another.
func TestABrokenStreamEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		x := &XDS{services: map[string]*serviceState{"registry": {watchers: map[resolver.ClientConn]bool{nil: true}}}}
		if _, err := x.receive(ctx, cancel, &brokenStream{}); !errors.Is(err, io.EOF) {
			t.Errorf("%v, want the error of the request", err)
		}
	})
}
