package discovery_test

import (
	"errors"
	"slices"
	"testing"
	"time"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/discovery"
	"watershed.dev/services/registry/internal/fixture"
)

// Gateways are counted once across all registries, until they leave.
func TestGatewaysAreCounted(t *testing.T) {
	fx := fixture.New(t)
	first, second := discovery.New(fx.Resources), discovery.New(fx.Resources)
	for _, step := range []struct {
		at      *discovery.Discovery
		name    string
		leaving bool
		want    int32
	}{
		{first, "a", false, 1}, {second, "b", false, 2}, {second, "a", false, 2}, {first, "c", false, 3},
		{first, "b", true, 2}, {first, "b", true, 2},
	} {
		got, err := step.at.Gateways(t.Context(), &registryv1.GatewaysRequest{Name: step.name, Leaving: step.leaving})
		if err != nil || got.Alive != step.want {
			t.Errorf("%s: %v, %v, not %d", step.name, got, err, step.want)
		}
	}
	// A full etcd grants no lease: a and c keep theirs, and a registry counts the others.
	fx.SetFull(t, true)
	for _, step := range []struct {
		name    string
		leaving bool
		want    int32
	}{
		{"a", false, 2}, {"d", false, 3}, {"e", false, 4}, {"d", false, 4}, {"c", false, 4}, {"e", true, 2}, {"a", false, 3},
	} {
		got, err := first.Gateways(t.Context(), &registryv1.GatewaysRequest{Name: step.name, Leaving: step.leaving})
		if err != nil || got.Alive != step.want {
			t.Errorf("%s in a full etcd: %v, %v, not %d", step.name, got, err, step.want)
		}
	}
	fx.SetFull(t, false)
	if got, err := first.Gateways(t.Context(), &registryv1.GatewaysRequest{Name: "d"}); err != nil || got.Alive != 3 {
		t.Errorf("d: %v, %v", got, err)
	}
	if _, err := first.Gateways(t.Context(), &registryv1.GatewaysRequest{}); err == nil {
		t.Error("a gateway without a name is counted")
	}
}

// addresses are endpoints that record changes.
type addresses []string

func (*addresses) Address(gateway string) string { return gateway }

func (a *addresses) Renew(address string) error { *a = append(*a, "+"+address); return nil }

func (a *addresses) Remove(address string) error { *a = append(*a, "-"+address); return nil }

// An address is an endpoint until the last gateway with the address drains or leaves.
func TestAddressesOfGateways(t *testing.T) {
	d, got := discovery.New(fixture.New(t).Resources), &addresses{}
	d.Endpoints = got
	for _, r := range []*registryv1.GatewaysRequest{
		{Name: "a", AdvertiseAddress: "1"},
		{Name: "a", AdvertiseAddress: "1", Accepting: true},
		{Name: "b", AdvertiseAddress: "1", Accepting: true},
		{Name: "c", AdvertiseAddress: "2", Accepting: true},
		{Name: "a", AdvertiseAddress: "1"},
		{Name: "a", AdvertiseAddress: "1", Leaving: true},
		{Name: "b", AdvertiseAddress: "1", Leaving: true},
		{Name: "c"},
		{Name: "c", AdvertiseAddress: "2"},
	} {
		if _, err := d.Gateways(t.Context(), r); err != nil {
			t.Fatal(err)
		}
	}
	if want := (addresses{"-1", "+1", "+1", "+2", "+1", "+1", "-1", "-2"}); !slices.Equal(*got, want) {
		t.Errorf("%q, not %q", *got, want)
	}
}

// A gateway's report has the time of its heartbeat. It ends with the gateway, and its size is bounded.
func TestGatewayReports(t *testing.T) {
	d, before := discovery.New(fixture.New(t).Resources), time.Now().UnixNano()
	call := func(r *registryv1.GatewaysRequest) error {
		_, err := d.Gateways(t.Context(), r)
		return err
	}
	reports := func() []*registryv1.GatewayReport {
		resp, err := d.GatewayReports(t.Context(), &registryv1.GatewayReportsRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Reports
	}
	if err := errors.Join(
		call(&registryv1.GatewaysRequest{Name: "a", Process: []byte("{}")}),
		call(&registryv1.GatewaysRequest{Name: "a", Report: true}), // replaces only the CRDs
	); err != nil {
		t.Fatal(err)
	}
	if got := reports(); len(got) != 1 || string(got[0].Report) != "{}" || got[0].ReceivedUnixNanos < before {
		t.Errorf("%v", got)
	}
	large := &registryv1.GatewaysRequest{Name: "a", Process: make([]byte, 65<<10)}
	if err := call(large); err != nil || len(reports()) != 1 || len(reports()[0].Report) != 0 {
		t.Errorf("with a report of 65 KiB: %v", err)
	}
	if err := call(&registryv1.GatewaysRequest{Name: "a", Leaving: true}); err != nil || len(reports()) != 0 {
		t.Errorf("the report stays: %v", err)
	}
}
