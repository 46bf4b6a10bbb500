package rpc

import (
	"encoding/json"
	"errors"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"watershed.dev/platform/version"
)

// Dial returns a connection to all replicas of a service. Their certificates must have the service's name. Close the
// connection to end it.
func Dial(id TLS, service string, replicas Replicas) (*grpc.ClientConn, error) {
	if a, ok := replicas.(Addresses); ok && len(a) == 0 {
		return nil, errors.New("no address for service " + service)
	}
	conf, err := id.ClientConfig(service)
	if err != nil {
		return nil, err
	}
	r := replicas.builder()
	options := append(TracingDialOptions(),
		grpc.WithChainUnaryInterceptor(trackUnary),
		grpc.WithResolvers(r),
		grpc.WithTransportCredentials(socketCredentials{credentials.NewTLS(conf)}),
		grpc.WithDefaultServiceConfig(serviceConfig(service)),
		grpc.WithIdleTimeout(0), // an idle connection keeps the balancer's state of replicas
		grpc.WithUserAgent("watershed/"+version.Release()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wireCodec), grpc.MaxCallRecvMsgSize(MaxMessageBytes),
			grpc.MaxCallSendMsgSize(MaxMessageBytes)),
		// An unread stream holds at most this window in the client. For a message that the client waits for, gRPC
		// extends the window to its size.
		grpc.WithInitialWindowSize(64<<10), grpc.WithInitialConnWindowSize(4<<20),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{ // drops a frozen replica after Time + Timeout
			Time:                10 * time.Second,
			Timeout:             3 * time.Second,
			PermitWithoutStream: true,
		}),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoffConfig, MinConnectTimeout: 2 * time.Second}),
	)
	return grpc.NewClient(r.Scheme()+":///"+service, options...)
}

// serviceConfig returns gRPC's service config of a service's clients: balancer, health checks and retries. If a replica
// is lost before it responds, gRPC sends the call again, to another ready replica if possible. A call of a method in
// NonIdempotent waits for a connection and is not sent again.
func serviceConfig(of string) string {
	type name struct {
		Service string `json:"service,omitempty"`
		Method  string `json:"method,omitempty"`
	}
	type method struct {
		Name         []name         `json:"name"`
		WaitForReady bool           `json:"waitForReady"`
		RetryPolicy  map[string]any `json:"retryPolicy,omitempty"`
	}
	methods := []method{{Name: []name{{}}, WaitForReady: true, RetryPolicy: map[string]any{
		"maxAttempts":          5,
		"initialBackoff":       "0.02s",
		"maxBackoff":           "0.5s",
		"backoffMultiplier":    3,
		"retryableStatusCodes": []string{"UNAVAILABLE"},
	}}}
	for _, m := range NonIdempotent {
		service, call, _ := strings.Cut(strings.TrimPrefix(m, "/"), "/")
		methods = append(methods, method{Name: []name{{service, call}}, WaitForReady: true})
	}
	data, err := json.Marshal(map[string]any{
		"loadBalancingConfig": []any{map[string]any{Balancer: struct{}{}}},
		"healthCheckConfig":   map[string]any{"serviceName": of},
		"methodConfig":        methods,
	})
	if err != nil { // every value can be encoded
		panic(err)
	}
	return string(data)
}

// Balancer is the name of the balancing policy of all clients. WithHashKey and WithAffinity choose the replicas of a
// call. TrackReplica records the replica that a call was sent to.
const Balancer = "watershed_rendezvous"

// Replicas is the source of the addresses of replicas: Addresses or XDS.
type Replicas interface {
	builder() resolver.Builder
	// AddressesOf returns the current addresses of a service's replicas.
	AddressesOf(service string) []string
}

// Addresses are all replicas of a service, in the form that ParseAddress parses. They do not change.
type Addresses []string

func (a Addresses) builder() resolver.Builder {
	r := manual.NewBuilderWithScheme("replicas")
	r.InitialState(stateOf(a))
	return r
}

// AddressesOf implements Replicas.
func (a Addresses) AddressesOf(string) []string { return a }

// DialReplica returns a connection to the replica of a service at an address, whether or not the replica is ready. Its
// calls fail at once if the replica cannot be reached.
func DialReplica(id TLS, service, address string) (*grpc.ClientConn, error) {
	conf, err := id.ClientConfig(service)
	if err != nil {
		return nil, err
	}
	r := Addresses{address}.builder()
	return grpc.NewClient(r.Scheme()+":///"+service,
		grpc.WithResolvers(r),
		grpc.WithTransportCredentials(socketCredentials{credentials.NewTLS(conf)}),
		grpc.WithUserAgent("watershed/"+version.Release()),
		grpc.WithDefaultCallOptions(grpc.ForceCodecV2(wireCodec), grpc.MaxCallRecvMsgSize(16<<20)),
	)
}
