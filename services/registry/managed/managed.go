// Package managed keeps objects' managedFields: which manager has set which field (KEP-555). It is upstream's field
// manager, but for what that would compute over and over.
package managed

import (
	"context"
	"encoding/binary"
	"fmt"
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/handlers/fieldmanager"
	"k8s.io/apiserver/pkg/warning"

	"watershed.dev/platform/lru"
)

// FieldManager keeps the managedFields of one endpoint's objects.
type FieldManager struct {
	*managedfields.FieldManager
	number uint64
}

var scopeNumbers atomic.Uint64

// New returns the field manager of an endpoint, made of upstream's.
func New(m *managedfields.FieldManager) *FieldManager { return &FieldManager{m, scopeNumbers.Add(1)} }

// Create gives a new object, which it may change, its managedFields: all its fields are the manager's. It does what
// UpdateNoErrors does with an empty object in place of the live one, which empty makes. Objects of one shape have the
// same fields, so those are computed once: pods of a template, and most of what programs create.
func (f *FieldManager) Create(empty func() (runtime.Object, error), obj runtime.Object,
	manager string) (runtime.Object, error) {
	m, err := meta.Accessor(obj)
	// upstream's has an encoding of a manager that JSON would change
	cacheable := err == nil && m.GetManagedFields() == nil && manager != "" && utf8.ValidString(manager)
	buffer := buffers.Get().(*[]byte)
	defer buffers.Put(buffer)
	var shape []byte
	if cacheable {
		shape, cacheable = shapeOf(binary.AppendUvarint((*buffer)[:0], f.number), obj)
		cacheable = cacheable && len(shape) <= maxShapeBytes
		if cap(shape) <= 2*maxShapeBytes {
			*buffer = shape[:0]
		}
	}
	if cacheable {
		if k, ok := cache.Get(hashShape(shape)); ok && k.shape == string(shape) {
			created.WithLabelValues("true").Inc()
			e := *k.entry.DeepCopy()
			e.Manager, e.Time = manager, &metav1.Time{Time: time.Now().UTC()}
			m.SetManagedFields([]metav1.ManagedFieldsEntry{e})
			return obj, nil
		}
	}
	created.WithLabelValues("false").Inc()
	live, err := empty()
	if err != nil {
		return nil, err
	}
	obj = f.UpdateNoErrors(live, obj, manager)
	if !cacheable {
		return obj, nil
	}
	if m, err = meta.Accessor(obj); err != nil {
		return obj, nil
	}
	// none: an error, or no field
	if entries := m.GetManagedFields(); len(entries) == 1 && entries[0].FieldsV1 != nil {
		cacheFields(shape, entries[0])
	}
	return obj, nil
}

const (
	// maxShapeBytes is how large a shape may be that is kept, in bytes.
	maxShapeBytes = 16 << 10
	// cacheBytes bounds what the process keeps, and overhead is about what an entry takes beside its bytes.
	cacheBytes    = 8 << 20
	entryOverhead = 300
)

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// cache are what is known of shapes, which begin with their endpoint's number, by their sums.
var cache = newCache()

type cachedFields struct {
	shape string
	entry metav1.ManagedFieldsEntry
}

func newCache() *lru.Cache[uint64, cachedFields] { return lru.New[uint64, cachedFields](cacheBytes) }

var seed = maphash.MakeSeed()

func hashShape(shape []byte) uint64 { return maphash.Bytes(seed, shape) }

func cacheFields(shape []byte, entry metav1.ManagedFieldsEntry) {
	cache.Put(hashShape(shape), cachedFields{string(shape), *entry.DeepCopy()},
		len(shape)+len(entry.FieldsV1.GetRawBytes())+entryOverhead)
}

var created = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_registry_managed_fields_total",
	Help: "New objects whose managedFields were made, by whether those of their shape were known.",
}, []string{"cached"})

// Metrics are this package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{created, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "watershed_registry_managed_fields_cache_bytes",
		Help: "Bytes of managedFields that are kept by shape.",
	}, func() float64 { return float64(cache.Bytes()) })}
}

// Validating has managedFields as they were before admission where wrap makes something of them that cannot be read
// (k8s.io/apiserver/pkg/endpoints/handlers/fieldmanager/admission.go). Those that it leaves alone are not read again.
type Validating struct{ admission.Interface }

// Admit implements admission.MutationInterface.
func (v Validating) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	mutating, ok := v.Interface.(admission.MutationInterface)
	if !ok {
		return nil
	}
	m, err := meta.Accessor(a.GetObject())
	if err != nil { // it has no metadata
		return mutating.Admit(ctx, a, o)
	}
	before := m.GetManagedFields()
	if err := mutating.Admit(ctx, a, o); err != nil {
		return err
	}
	after := m.GetManagedFields()
	if slices.EqualFunc(before, after, equalEntries) {
		return nil
	}
	if err := managedfields.ValidateManagedFields(after); err != nil {
		m.SetManagedFields(before)
		warning.AddWarning(ctx, "",
			fmt.Sprintf(fieldmanager.InvalidManagedFieldsAfterMutatingAdmissionWarningFormat, err))
	}
	return nil
}

// Validate implements admission.ValidationInterface.
func (v Validating) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if validating, ok := v.Interface.(admission.ValidationInterface); ok {
		return validating.Validate(ctx, a, o)
	}
	return nil
}

func equalEntries(a, b metav1.ManagedFieldsEntry) bool {
	fields := func(e metav1.ManagedFieldsEntry) string { return e.FieldsV1.GetRawString() }
	return a.Manager == b.Manager && a.Operation == b.Operation && a.APIVersion == b.APIVersion &&
		a.Subresource == b.Subresource && a.FieldsType == b.FieldsType && (a.FieldsV1 == nil) == (b.FieldsV1 == nil) &&
		fields(a) == fields(b)
}
