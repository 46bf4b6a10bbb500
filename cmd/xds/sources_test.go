package xds

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	listers "k8s.io/client-go/listers/discovery/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"
)

// A file is published completely or not at all, and again after each change.
func TestAFileNamesReplicas(t *testing.T) {
	path := filepath.Join(t.TempDir(), "replicas.yaml")
	s := newServer("")
	f := &fileSource{path: path, server: s}
	modTime := time.Now()
	for _, step := range []struct{ content, want, err string }{
		{"registry: ['127.0.0.1:2', '127.0.0.1:1', '127.0.0.1:1']\n", "[{127.0.0.1:1 } {127.0.0.1:2 }]", ""},
		{"registry: ['127.0.0.1:3']\nauthz: ['nowhere']\n", "[{127.0.0.1:1 } {127.0.0.1:2 }]", "authz"},
		{"registry: {a: b}\n", "[{127.0.0.1:1 } {127.0.0.1:2 }]", "--replicas-file"},
		{"registry: []\n", "[{127.0.0.1:1 } {127.0.0.1:2 }]", ""},
		{"registry: ['[::1]:3']\n", "[{[::1]:3 }]", ""},
		{"registry: ['unix:/run/r']\n", "[{unix:/run/r }]", ""},
		{"registry: ['unix:r']\n", "[{unix:/run/r }]", "registry"},
	} {
		if err := os.WriteFile(path, []byte(step.content), 0o600); err != nil {
			t.Fatal(err)
		}
		modTime = modTime.Add(time.Second)
		if err := os.Chtimes(path, modTime, modTime); err != nil {
			t.Fatal(err)
		}
		err := f.read()
		if got := fmt.Sprint(s.replicas["registry"]); got != step.want {
			t.Errorf("%s: %s", step.content, got)
		}
		if (err != nil) != (step.err != "") || err != nil && !strings.Contains(err.Error(), step.err) {
			t.Errorf("%s: %v", step.content, err)
		}
	}
}

// The replicas of a Service are the ready endpoints that are not terminating, with the configured port.
func TestEndpointSlicesNameReplicas(t *testing.T) {
	endpoint := func(address string, ready, terminating *bool) discoveryv1.Endpoint {
		return discoveryv1.Endpoint{
			Addresses:  []string{address},
			Conditions: discoveryv1.EndpointConditions{Ready: ready, Terminating: terminating},
			Zone:       ptr.To("a"),
		}
	}
	slice := func(name, service string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name:      name,
				Namespace: "watershed",
				Labels:    map[string]string{discoveryv1.LabelServiceName: service},
			},
			Ports: []discoveryv1.EndpointPort{
				{Name: ptr.To("debug"), Port: ptr.To[int32](8080)},
				{Name: ptr.To("rpc"), Port: ptr.To[int32](7001)},
				{Name: ptr.To("any")},
			},
			Endpoints: endpoints,
		}
	}
	index := cache.NewIndexer(
		cache.MetaNamespaceKeyFunc,
		cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc},
	)
	for _, s := range []*discoveryv1.EndpointSlice{
		slice("one", "registry", endpoint("192.0.2.1", nil, nil), endpoint("192.0.2.2", ptr.To(false), nil)),
		slice("two", "registry", endpoint("2001:db8::1", ptr.To(true), ptr.To(false)),
			endpoint("192.0.2.3", ptr.To(true), ptr.To(true))),
		slice("other", "authz", endpoint("192.0.2.9", nil, nil)),
	} {
		if err := index.Add(s); err != nil {
			t.Fatal(err)
		}
	}
	e := &sliceSource{lister: listers.NewEndpointSliceLister(index).EndpointSlices("watershed")}
	for _, port := range []string{"rpc", "7001"} {
		s := newServer("")
		all, err := e.replicas("registry", port)
		s.set("registry", all)
		if got := fmt.Sprint(s.replicas["registry"]); got != "[{192.0.2.1:7001 a} {[2001:db8::1]:7001 a}]" ||
			err != nil {
			t.Errorf("%s: %s, %v", port, got, err)
		}
	}
	if all, err := e.replicas("registry", "none"); len(all) != 0 || err != nil {
		t.Errorf("%v, %v", all, err)
	}
}

// Invalid settings are rejected with the name of their flag.
func TestInvalidSettingsAreRejected(t *testing.T) {
	good := Config{Address: "127.0.0.1:1", File: "x", DNSPeriod: time.Second}
	if err := good.validate(); err != nil {
		t.Error(err)
	}
	for flag, c := range map[string]Config{
		"--rpc-address":   {File: "x", DNSPeriod: time.Second},
		"--replicas-file": {Address: "a:1", DNSPeriod: time.Second},
		"--dns-period":    {Address: "a:1", File: "x"},
		"--endpoint-slices-namespace": {Address: "a:1", DNSPeriod: time.Second,
			Slices: map[string]string{"registry": "a:b"}},
		"--endpoint-slices registry=": {
			Address: "a:1", DNSPeriod: time.Second, SlicesNamespace: "n", Slices: map[string]string{"registry": "a"},
		},
		"--dns": {
			Address: "a:1", DNSPeriod: time.Second, SlicesNamespace: "n", Slices: map[string]string{"registry": "a:b"},
			DNS: map[string]string{"registry": "a:1"},
		},
	} {
		if err := c.validate(); err == nil || !strings.Contains(err.Error(), flag) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
