package rpc

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"maps"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "watershed.dev/proto/watershed/admission/v1"
	_ "watershed.dev/proto/watershed/authn/v1"
	_ "watershed.dev/proto/watershed/authz/v1"
	_ "watershed.dev/proto/watershed/process/v1"
	_ "watershed.dev/proto/watershed/registry/v1"
	_ "watershed.dev/proto/watershed/watchfanout/v1"
)

// AllowedClients has every method of every contract, and no other method.
func TestEveryMethodHasAllowedClients(t *testing.T) {
	methods := map[string]bool{}
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if !strings.HasPrefix(string(f.Package()), "watershed.") {
			return true
		}
		for i := range f.Services().Len() {
			s := f.Services().Get(i)
			for j := range s.Methods().Len() {
				methods["/"+string(s.FullName())+"/"+string(s.Methods().Get(j).Name())] = true
			}
		}
		return true
	})
	if len(methods) < 20 {
		t.Fatalf("only %d methods were found", len(methods))
	}
	for m := range methods {
		if len(AllowedClients[m]) == 0 {
			t.Errorf("no service may call %s", m)
		}
	}
	for m := range AllowedClients {
		if !methods[m] && strings.HasPrefix(m, "/watershed.") {
			t.Errorf("there is no %s", m)
		}
	}
}

func TestClientsCallAllowedMethods(t *testing.T) {
	as := func(name string) context.Context {
		cert := &x509.Certificate{Subject: pkix.Name{CommonName: name}}
		state := tls.ConnectionState{PeerCertificates: []*x509.Certificate{cert}}
		return peer.NewContext(t.Context(), &peer.Peer{AuthInfo: credentials.TLSInfo{State: state}})
	}
	for _, name := range []string{"gateway", "watchfanout", "authn", "authz", "admission", "registry", "etcd",
		"nats", "", "kubernetes-admin"} {
		for method, callers := range AllowedClients {
			want := codes.PermissionDenied
			for _, c := range callers {
				if c == name {
					want = codes.OK
				}
			}
			if got := status.Code(authorize(as(name), method)); got != want {
				t.Errorf("%q calls %s: %v, want %v", name, method, got, want)
			}
		}
	}
	for name, method := range map[string]string{ // even if the table changes
		"watchfanout": "/watershed.registry.v1.Objects/Write",
		"authz":       "/watershed.registry.v1.Objects/Get",
		"admission":   "/watershed.authn.v1.Authn/Authenticate",
		"registry":    "/watershed.authz.v1.Authz/Authorize",
	} {
		if got := status.Code(authorize(as(name), method)); got != codes.PermissionDenied {
			t.Errorf("%q calls %s: %v", name, method, got)
		}
	}
	if got := status.Code(authorize(as("gateway"),
		"/watershed.registry.v1.Objects/Unheard")); got != codes.PermissionDenied {
		t.Errorf("a method that the table lacks: %v", got)
	}
	if got := status.Code(authorize(t.Context(), "/watershed.registry.v1.Objects/Get")); got != codes.Unauthenticated {
		t.Errorf("without a certificate: %v", got)
	}
}

// gRPC sends a write once, even if its replica is lost. It may retry all other calls.
func TestNonIdempotentCallsAreNotRetried(t *testing.T) {
	var config struct {
		MethodConfig []struct {
			Name        []struct{ Service, Method string }
			RetryPolicy map[string]any
		}
	}
	if err := json.Unmarshal([]byte(serviceConfig("registry")), &config); err != nil {
		t.Fatal(err)
	}
	retried := map[string]bool{}
	for _, m := range config.MethodConfig {
		for _, n := range m.Name {
			retried["/"+n.Service+"/"+n.Method] = m.RetryPolicy != nil
		}
	}
	want := map[string]bool{"//": true, "/watershed.registry.v1.Objects/Write": false,
		"/watershed.registry.v1.Objects/WriteUnary": false}
	if !maps.Equal(retried, want) {
		t.Errorf("%v", retried)
	}
	for _, m := range NonIdempotent {
		if len(AllowedClients[m]) == 0 {
			t.Errorf("there is no %s", m)
		}
	}
}
