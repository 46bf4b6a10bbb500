package rpc

import (
	"bytes"
	"io"
	"net"
	"slices"
	"testing"

	core "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	discovery "github.com/envoyproxy/go-control-plane/envoy/service/discovery/v3"
	"google.golang.org/grpc/resolver"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
)

// Any response of an xDS server leaves a service with its earlier endpoints, or with valid endpoints.
func FuzzEndpoints(f *testing.F) {
	socket := &core.Address{Address: &core.Address_SocketAddress{SocketAddress: &core.SocketAddress{Address: "::1",
		PortSpecifier: &core.SocketAddress_PortValue{PortValue: 70000}}}}
	pipe := &core.Address{Address: &core.Address_Pipe{Pipe: &core.Pipe{Path: "/run/a b"}}}
	for _, address := range []*core.Address{socket, pipe, nil} {
		a := &endpoint.ClusterLoadAssignment{ClusterName: "registry", Endpoints: []*endpoint.LocalityLbEndpoints{nil,
			{LbEndpoints: []*endpoint.LbEndpoint{{HostIdentifier: &endpoint.LbEndpoint_Endpoint{
				Endpoint: &endpoint.Endpoint{Address: address}}}}}}}
		packed, err := anypb.New(a)
		if err != nil {
			f.Fatal(err)
		}
		data, err := proto.Marshal(&discovery.DiscoveryResponse{TypeUrl: endpointType, Resources: []*anypb.Any{packed}})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m := &discovery.DiscoveryResponse{}
		if proto.Unmarshal(data, m) != nil {
			return
		}
		m.TypeUrl = endpointType
		x := &XDS{
			config:   XDSConfig{Dir: t.TempDir()},
			services: map[string]*serviceState{"registry": {watchers: map[resolver.ClientConn]bool{}}},
		}
		x.services["registry"].addresses = []string{"192.0.2.1:1"}
		x.services["registry"].watchers[ignore{}] = true
		_ = x.handleResponse(m)
		all := x.AddressesOf("registry")
		if len(all) == 0 {
			t.Error("the service has no endpoints left")
		}
		for _, a := range all {
			if _, err := ParseAddress(a); err != nil {
				t.Error(err)
			}
		}
		if cached := x.readCache("registry"); len(cached) > 0 && !slices.Equal(cached, all) {
			t.Errorf("the cache has %q, not %q", cached, all)
		}
	})
}

// ignore is a connection that ignores endpoints.
type ignore struct{ resolver.ClientConn }

func (ignore) UpdateState(resolver.State) error { return nil }

// The reader of a handshake returns whole TLS records, and no byte after them.
func FuzzRecords(f *testing.F) {
	f.Add([]byte{22, 3, 1, 0, 2, 'a', 'b', 23, 3, 3, 0, 0, 'x'}, 1)
	f.Add([]byte{22, 3, 1, 0x41, 1}, 7)
	f.Add([]byte{22, 3, 1, 0xff, 0xff}, 3)
	f.Fuzz(func(t *testing.T, data []byte, size int) {
		r := &recordReader{Conn: &bytesConn{Reader: bytes.NewReader(data)}}
		p := make([]byte, 1+uint(size)%1000)
		var got []byte
		for {
			n, err := r.Read(p)
			got = append(got, p[:n]...)
			if err != nil {
				break
			}
		}
		if !bytes.HasPrefix(data, got) || r.done() != nil {
			t.Errorf("it reads %q of %q", got, data)
		}
		for len(got) > 0 {
			n := recordHeader + int(got[3])<<8 + int(got[4])
			if n > len(got) || n > recordHeader+maxRecord || got[1] != majorVersion {
				t.Fatalf("it reads the record %q", got)
			}
			got = got[n:]
		}
	})
}

// bytesConn is a connection that receives bytes.
type bytesConn struct {
	net.Conn
	io.Reader
}

func (c *bytesConn) Read(p []byte) (int, error) { return c.Reader.Read(p) }
