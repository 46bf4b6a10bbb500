package features

import (
	"fmt"
	"slices"

	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	zpages "k8s.io/component-base/zpages/features"
)

// replacedGate describes a feature gate that upstream reads in code that Watershed replaces: GenericAPIServer, the
// handlers, the watch cache. Upstream's other code reads all other gates, and Watershed links it.
type replacedGate struct {
	// rejected is the reason for which the gate cannot leave its default. Empty: Watershed implements both values, or
	// neither has an effect.
	rejected string
	// noEffect is the reason for which another value is accepted and changes nothing: upstream's two implementations
	// give clients the same responses. The process logs it at its start.
	noEffect string
}

// replacedGates has each such gate that is not locked. A test compares the names with upstream's code.
var replacedGates = map[featuregate.Feature]replacedGate{
	features.AllowUnsafeMalformedObjectDeletion:    {},
	features.APIResponseCompression:                {},
	features.APIServerIdentity:                     {},
	features.CBORServingAndStorage:                 {},
	features.ConstrainedImpersonation:              {},
	features.DetectCacheInconsistency:              {},
	features.RemoteRequestHeaderUID:                {},
	features.ShardedListAndWatch:                   {},
	features.StorageVersionHash:                    {},
	features.WatchCacheInitializationPostStartHook: {},
	features.WatchList:                             {},
	zpages.ComponentFlagz:                          {},
	zpages.ComponentStatusz:                        {},
	// It is a check of the start only: the gateways proxy to no peer, and --peer-ca-file is rejected.
	features.UnknownVersionInteroperabilityProxy: {},
	// Upstream's authentication filter reads it.
	features.UnauthenticatedHTTP2DOSMitigation: {},

	features.APIServingWithRoutine:       {noEffect: "requests are served by the goroutines of package server"},
	features.ConcurrentWatchObjectDecode: {noEffect: "no API server decodes the events of a watch"},
	features.ListFromCacheSnapshot:       {noEffect: "the watch cache serves pages from snapshots"},
	features.SizeBasedListCostEstimate:   {noEffect: "the size of a list is always its cost"},

	features.StorageVersionAPI: {rejected: "no StorageVersion objects are written"},
}

// checkReplaced returns an error for the first gate that is not at its default although Watershed implements only the
// default.
func checkReplaced() error {
	for name, gate := range changedGates() {
		if gate.rejected != "" {
			value := utilfeature.DefaultFeatureGate.Enabled(name)
			return fmt.Errorf("%s=%t: %s; set %s=%t", name, value, gate.rejected, name, !value)
		}
	}
	return nil
}

// changedGates returns the replaced gates that are not at their default.
func changedGates() map[featuregate.Feature]replacedGate {
	changed, all := map[featuregate.Feature]replacedGate{}, utilfeature.DefaultMutableFeatureGate.GetAll()
	for name, gate := range replacedGates {
		if utilfeature.DefaultFeatureGate.Enabled(name) != all[name].Default {
			changed[name] = gate
		}
	}
	return changed
}

// WithoutEffect returns a line for each gate whose value was set and changes nothing, in the order of their names.
func WithoutEffect() (lines []string) {
	for name, gate := range changedGates() {
		if gate.noEffect != "" {
			value := utilfeature.DefaultFeatureGate.Enabled(name)
			lines = append(lines, fmt.Sprintf("%s=%t changes nothing: %s", name, value, gate.noEffect))
		}
	}
	slices.Sort(lines)
	return lines
}
