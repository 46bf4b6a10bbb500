package managed

import (
	"github.com/prometheus/client_golang/prometheus/testutil"
	"k8s.io/apimachinery/pkg/runtime"
)

// ShapeOf returns the shape of an object without the number of a FieldManager.
func ShapeOf(obj runtime.Object) ([]byte, bool) {
	s := shape{}
	ok := s.add(obj) && len(s.bytes) <= maxShapeBytes
	return s.bytes, ok
}

// ResetCache empties the caches.
func ResetCache() { cache, updates = newCache(), newUpdates() }

// CachedUpdates returns the number of updates whose outcome was in the cache.
func CachedUpdates() float64 { return testutil.ToFloat64(computed.WithLabelValues("update", "true")) }
