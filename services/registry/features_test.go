package registry

import (
	"maps"
	"slices"
	"testing"

	utilfeature "k8s.io/apiserver/pkg/util/feature"
	_ "k8s.io/kubernetes/pkg/features"

	"watershed.dev/platform/features"
)

// platform/features, which the gateway uses, lists exactly Kubernetes' feature gates.
func TestTheKnownFeatureGatesAreKubernetesOwn(t *testing.T) {
	var all []string
	for f := range maps.Keys(utilfeature.DefaultMutableFeatureGate.GetAll()) {
		all = append(all, string(f))
	}
	slices.Sort(all)
	if !slices.Equal(all, features.KnownGates()) {
		t.Errorf("platform/features/names.go must list:\n%q", all)
	}
}
