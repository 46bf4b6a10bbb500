package discovery_test

import (
	"testing"

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
	if _, err := first.Gateways(t.Context(), &registryv1.GatewaysRequest{}); err == nil {
		t.Error("a gateway without a name is counted")
	}
}
