package registry

import (
	"maps"
	"slices"
	"testing"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	_ "k8s.io/kubernetes/pkg/features"

	"watershed.dev/platform/features"
)

// What the gateway takes for a feature gate is one.
func TestTheKnownFeatureGatesAreKubernetesOwn(t *testing.T) {
	var all []string
	for f := range maps.Keys(utilfeature.DefaultMutableFeatureGate.GetAll()) {
		all = append(all, string(f))
	}
	slices.Sort(all)
	if !slices.Equal(all, features.KnownGates()) {
		t.Errorf("platform/features/names.go is to have:\n%q", all)
	}
}
