package xds

import (
	"time"

	xdstype "github.com/cncf/xds/go/xds/type/v3"
	cluster "github.com/envoyproxy/go-control-plane/envoy/config/cluster/v3"
	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	listener "github.com/envoyproxy/go-control-plane/envoy/config/listener/v3"
	route "github.com/envoyproxy/go-control-plane/envoy/config/route/v3"
	routerfilter "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	hcm "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	roundrobin "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/round_robin/v3"
	"github.com/envoyproxy/go-control-plane/pkg/cache/types"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"watershed.dev/platform/rpc"
)

// resourcesOf returns the resources, by type, that gRPC's own xDS client needs for xds:///service. Watershed's clients
// request only the endpoints (rpc.XDS).
func resourcesOf(service string, replicas []Replica) map[string]types.Resource {
	return map[string]types.Resource{
		resource.ListenerType: listenerOf(service),
		resource.RouteType:    routesOf(service),
		resource.ClusterType:  clusterOf(service),
		resource.EndpointType: endpointsOf(service, replicas),
	}
}

func listenerOf(service string) *listener.Listener {
	return &listener.Listener{
		Name: service,
		ApiListener: &listener.ApiListener{ApiListener: pack(&hcm.HttpConnectionManager{
			RouteSpecifier: &hcm.HttpConnectionManager_Rds{
				Rds: &hcm.Rds{ConfigSource: aggregated(), RouteConfigName: service},
			},
			HttpFilters: []*hcm.HttpFilter{{
				Name:       "router",
				ConfigType: &hcm.HttpFilter_TypedConfig{TypedConfig: pack(&routerfilter.Router{})},
			}},
		})},
	}
}

// routesOf routes all methods to the cluster of the service, and retries all except rpc.NonIdempotent.
func routesOf(service string) *route.RouteConfiguration {
	to := func(retry *route.RetryPolicy) *route.Route_Route {
		return &route.Route_Route{Route: &route.RouteAction{
			ClusterSpecifier: &route.RouteAction_Cluster{Cluster: service},
			RetryPolicy:      retry,
		}}
	}
	var routes []*route.Route
	for _, method := range rpc.NonIdempotent {
		routes = append(routes, &route.Route{
			Match:  &route.RouteMatch{PathSpecifier: &route.RouteMatch_Path{Path: method}},
			Action: to(nil),
		})
	}
	routes = append(routes, &route.Route{
		Match: &route.RouteMatch{PathSpecifier: &route.RouteMatch_Prefix{Prefix: ""}},
		Action: to(&route.RetryPolicy{
			RetryOn:    "unavailable",
			NumRetries: wrapperspb.UInt32(4),
			RetryBackOff: &route.RetryPolicy_RetryBackOff{
				BaseInterval: durationpb.New(20 * time.Millisecond),
				MaxInterval:  durationpb.New(500 * time.Millisecond),
			},
		}),
	})
	return &route.RouteConfiguration{
		Name: service,
		// any host, because a client's authority is the name in the service's certificate
		VirtualHosts: []*route.VirtualHost{{Name: service, Domains: []string{"*"}, Routes: routes}},
	}
}

// maxRequests disables the limit of concurrent requests. gRPC's default of 1,024 counts streams, and a watch is a
// stream for its whole lifetime.
const maxRequests = 1<<32 - 1

// clusterOf names Watershed's load balancing policy (rpc.Balancer), and a fallback for clients without it. It
// configures no outlier detection, because gRPC counts every status other than OK as a failure. That includes watches
// that their clients cancelled, and it ejected healthy replicas.
func clusterOf(service string) *cluster.Cluster {
	policies := []*cluster.LoadBalancingPolicy_Policy{
		policy(rpc.Balancer, &xdstype.TypedStruct{
			TypeUrl: "type.googleapis.com/" + rpc.Balancer,
			Value:   &structpb.Struct{},
		}),
		policy("round_robin", &roundrobin.RoundRobin{}),
	}
	return &cluster.Cluster{
		Name:                 service,
		ClusterDiscoveryType: &cluster.Cluster_Type{Type: cluster.Cluster_EDS},
		EdsClusterConfig:     &cluster.Cluster_EdsClusterConfig{EdsConfig: aggregated()},
		LoadBalancingPolicy:  &cluster.LoadBalancingPolicy{Policies: policies},
		CircuitBreakers: &cluster.CircuitBreakers{Thresholds: []*cluster.CircuitBreakers_Thresholds{{
			MaxRequests: wrapperspb.UInt32(maxRequests),
		}}},
	}
}

func policy(name string, config proto.Message) *cluster.LoadBalancingPolicy_Policy {
	return &cluster.LoadBalancingPolicy_Policy{
		TypedExtensionConfig: &core.TypedExtensionConfig{Name: name, TypedConfig: pack(config)},
	}
}

// endpointsOf returns a service's replicas by zone.
func endpointsOf(service string, replicas []Replica) *endpoint.ClusterLoadAssignment {
	zones := map[string]*endpoint.LocalityLbEndpoints{}
	a := &endpoint.ClusterLoadAssignment{ClusterName: service}
	for _, r := range replicas {
		address, err := endpointAddress(r.Address)
		if err != nil { // the sources have validated it
			continue
		}
		l := zones[r.Zone]
		if l == nil {
			l = &endpoint.LocalityLbEndpoints{
				Locality:            &core.Locality{Zone: r.Zone},
				LoadBalancingWeight: wrapperspb.UInt32(0),
			}
			zones[r.Zone] = l
			a.Endpoints = append(a.Endpoints, l)
		}
		l.LoadBalancingWeight.Value++ // a zone receives calls in proportion to its replicas
		l.LbEndpoints = append(l.LbEndpoints, &endpoint.LbEndpoint{
			HealthStatus:   core.HealthStatus_HEALTHY,
			HostIdentifier: &endpoint.LbEndpoint_Endpoint{Endpoint: &endpoint.Endpoint{Address: address}},
		})
	}
	return a
}

// endpointAddress returns a replica's address in xDS: a socket is a pipe. gRPC's own xDS clients cannot call pipes;
// rpc.XDS can.
func endpointAddress(address string) (*core.Address, error) {
	a, err := rpc.ParseAddress(address)
	if err != nil {
		return nil, err
	}
	if a.Path != "" {
		return &core.Address{Address: &core.Address_Pipe{Pipe: &core.Pipe{Path: a.Path}}}, nil
	}
	return &core.Address{Address: &core.Address_SocketAddress{SocketAddress: &core.SocketAddress{
		Address:       a.Host,
		PortSpecifier: &core.SocketAddress_PortValue{PortValue: uint32(a.Port)},
	}}}, nil
}

func aggregated() *core.ConfigSource {
	return &core.ConfigSource{
		ConfigSourceSpecifier: &core.ConfigSource_Ads{Ads: &core.AggregatedConfigSource{}},
		ResourceApiVersion:    core.ApiVersion_V3,
	}
}

func pack(m proto.Message) *anypb.Any {
	a, err := anypb.New(m)
	if err != nil { // Watershed's own messages always marshal
		panic(err)
	}
	return a
}
