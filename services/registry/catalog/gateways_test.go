package catalog_test

import (
	"testing"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/catalog"
	"watershed.dev/services/registry/internal/world"
)

// Gateways are counted over all registries, each once, until they leave.
func TestGatewaysAreCounted(t *testing.T) {
	w := world.New(t)
	one, other := catalog.New(w.Resources), catalog.New(w.Resources)
	for _, step := range []struct {
		at      *catalog.Catalog
		name    string
		leaving bool
		want    int32
	}{
		{one, "a", false, 1}, {other, "b", false, 2}, {other, "a", false, 2}, {one, "c", false, 3}, {one, "b", true, 2},
		{one, "b", true, 2},
	} {
		got, err := step.at.Gateways(t.Context(), &registryv1.GatewaysRequest{Name: step.name, Leaving: step.leaving})
		if err != nil || got.Alive != step.want {
			t.Errorf("%s: %v, %v, not %d", step.name, got, err, step.want)
		}
	}
	if _, err := one.Gateways(t.Context(), &registryv1.GatewaysRequest{}); err == nil {
		t.Error("nobody is counted")
	}
}
