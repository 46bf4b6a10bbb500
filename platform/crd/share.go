package crd

import (
	"reflect"
	"runtime"
	"sync"
	"weak"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apimachinery/pkg/types"
)

// Share replaces the schemas of d by equal schemas of the same CRD that the process has. A decoded schema takes twelve
// times the memory of its JSON, and each informer and each reader of etcd decodes the CRD. Schemas are immutable once d
// is shared. The process keeps a schema while something refers to it.
//
// Share removes managedFields from d, which can be as large as the schemas. No reader of CRDs in a process needs them,
// and an update of d's status keeps the stored managedFields. Annotations stay: the controllers of CRDs update the
// status with d, and upstream's status strategy then stores d's annotations (kubernetes/kubernetes#137681).
func Share(d *apiextensionsv1.CustomResourceDefinition) {
	d.ManagedFields = nil
	if d.UID == "" {
		return
	}
	for i := range d.Spec.Versions {
		v := &d.Spec.Versions[i]
		if v.Schema != nil {
			v.Schema = schemas.share(version{d.UID, v.Name}, v.Schema)
		}
	}
}

// Transform is the cache.TransformFunc of an informer of CRDs: Share.
func Transform(obj any) (any, error) {
	if d, ok := obj.(*apiextensionsv1.CustomResourceDefinition); ok {
		Share(d)
	}
	return obj, nil
}

// version identifies a version of a CRD.
type version struct {
	uid  types.UID
	name string
}

// weakMap holds values that something else refers to. It is safe for concurrent use.
type weakMap[K comparable, V any] struct {
	mu      sync.Mutex
	entries map[K]weak.Pointer[V]
}

var (
	schemas weakMap[version, apiextensionsv1.CustomResourceValidation]
	// structurals are the structural schemas by their schema, without and with preserved unknown fields.
	structurals [2]weakMap[weak.Pointer[apiextensionsv1.CustomResourceValidation], structuralschema.Structural]
)

// get returns the value of a key, or nil.
func (m *weakMap[K, V]) get(key K) *V {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.entries[key].Value()
}

// put sets the value of a key until nothing refers to the value.
func (m *weakMap[K, V]) put(key K, value *V) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.entries == nil {
		m.entries = map[K]weak.Pointer[V]{}
	}
	m.entries[key] = weak.Make(value)
	runtime.AddCleanup(value, m.forget, key)
}

// forget deletes the entry of a key whose value is collected.
func (m *weakMap[K, V]) forget(key K) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.entries[key].Value() == nil {
		delete(m.entries, key)
	}
}

// share returns the value of a key if it equals value. Otherwise value becomes the value of the key.
func (m *weakMap[K, V]) share(key K, value *V) *V {
	known := m.get(key)
	if known != nil && (known == value || reflect.DeepEqual(known, value)) {
		return known
	}
	m.put(key, value)
	return value
}
