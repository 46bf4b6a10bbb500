package storage

import (
	"fmt"
	"hash/fnv"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/platform/version"
)

// encoderOf returns a hash of the settings that determine the bytes of an object in the log. They are the release, the
// feature gates, which may change defaults, and the version of the encoding. Registries with other settings may encode
// an object of etcd as other bytes. docs/design/0034 has the limits. The hash is never 0.
func encoderOf(kind schema.GroupVersionKind) uint32 {
	h := fnv.New32a()
	fmt.Fprint(h, settings(), kind)
	return max(1, h.Sum32())
}

// settings are the release and the feature gates. The flags of the process must be parsed before.
var settings = sync.OnceValue(func() string {
	text := version.Release()
	gates := utilfeature.DefaultMutableFeatureGate
	for _, gate := range slices.Sorted(maps.Keys(gates.GetAll())) {
		text += fmt.Sprintf(" %s=%t", gate, gates.Enabled(gate))
	}
	return text
})
