package features

import (
	"fmt"

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
}

// replacedGates has each such gate that is not locked. A test compares the names with upstream's code.
var replacedGates = map[featuregate.Feature]replacedGate{
	features.AllowUnsafeMalformedObjectDeletion:    {},
	features.APIResponseCompression:                {},
	features.APIServerIdentity:                     {},
	features.ConstrainedImpersonation:              {},
	features.DetectCacheInconsistency:              {},
	features.ShardedListAndWatch:                   {},
	features.StorageVersionHash:                    {},
	features.WatchCacheInitializationPostStartHook: {},
	features.WatchList:                             {},
	zpages.ComponentFlagz:                          {},
	zpages.ComponentStatusz:                        {},
	// It is a check of the start only: the gateways proxy to no peer, and --peer-ca-file is rejected.
	features.UnknownVersionInteroperabilityProxy: {},
	// Upstream's authentication filter reads it.
	features.RemoteRequestHeaderUID:            {},
	features.UnauthenticatedHTTP2DOSMitigation: {},

	features.APIServingWithRoutine:       {"requests are served by the goroutines of package server"},
	features.CBORServingAndStorage:       {"CBOR is neither served nor stored"},
	features.ConcurrentWatchObjectDecode: {"no API server decodes the events of a watch"},
	features.ListFromCacheSnapshot:       {"lists at a revision are always served by the watch cache"},
	features.SizeBasedListCostEstimate:   {"the cost of a list is always its size"},
	features.StorageVersionAPI:           {"no StorageVersion objects are written"},
}

// checkReplaced returns an error for the first gate that is not at its default although Watershed implements only the
// default.
func checkReplaced() error {
	all := utilfeature.DefaultMutableFeatureGate.GetAll()
	for name, gate := range replacedGates {
		standard := all[name].Default
		if gate.rejected != "" && utilfeature.DefaultFeatureGate.Enabled(name) != standard {
			return fmt.Errorf("%s=%t: %s; set %s=%t", name, !standard, gate.rejected, name, standard)
		}
	}
	return nil
}
