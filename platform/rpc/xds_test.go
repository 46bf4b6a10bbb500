package rpc

import (
	"fmt"
	"testing"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
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
