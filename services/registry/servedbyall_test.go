package registry

import (
	"maps"
	"testing"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/controllers"
	"watershed.dev/services/registry/discovery"
	"watershed.dev/services/registry/internal/fixture"
)

// endpoints accepts every address.
type endpoints struct{ discovery.Endpoints }

func (endpoints) Address(gateway string) string { return gateway }
func (endpoints) Renew(string) error            { return nil }
func (endpoints) Remove(string) error           { return nil }

// A CRD is served once each live gateway has reported it, at any registry. A kube-apiserver does not report.
func TestServedByAllGateways(t *testing.T) {
	resources := fixture.New(t).Resources
	s := &Service{resources: resources}
	first, second := discovery.New(resources), discovery.New(resources)
	first.Endpoints, second.Endpoints = endpoints{}, endpoints{}
	type crds = map[string]int64
	step := func(at *discovery.Discovery, r *registryv1.GatewaysRequest, want crds) {
		t.Helper()
		r.AdvertiseAddress, r.Accepting = "192.0.2."+r.Name, true
		if _, err := at.Gateways(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		if got, err := s.servedByAll(t.Context()); err != nil || !maps.Equal(got, want) {
			t.Errorf("%v: %v, %v, not %v", r, got, err, want)
		}
	}
	if _, err := first.Gateways(t.Context(), &registryv1.GatewaysRequest{Name: "1", Report: true}); err == nil {
		t.Error("a gateway that does not count reports")
	}
	step(first, &registryv1.GatewaysRequest{Name: "1", Establishing: crds{"a": 1}}, crds{"a": 1})
	step(second, &registryv1.GatewaysRequest{Name: "2"}, nil)
	step(second, &registryv1.GatewaysRequest{Name: "2", Report: true, Establishing: crds{"a": 2, "b": 3}}, crds{"a": 1})
	step(first, &registryv1.GatewaysRequest{Name: "1", Report: true, Establishing: crds{"a": 4, "b": 3}},
		crds{"a": 2, "b": 3})
	step(first, &registryv1.GatewaysRequest{Name: "2", Leaving: true}, crds{"a": 4, "b": 3})
	server := func(address string, want crds) {
		t.Helper()
		key := resources.Storage.Prefix() + controllers.MasterLeases + address
		if _, err := resources.Storage.Client.Client.Put(t.Context(), key, ""); err != nil {
			t.Fatal(err)
		}
		if got, err := s.servedByAll(t.Context()); err != nil || !maps.Equal(got, want) {
			t.Errorf("with %s: %v, %v, not %v", address, got, err, want)
		}
	}
	server("192.0.2.1", crds{"a": 4, "b": 3})
	server("192.0.2.9", nil)
}
