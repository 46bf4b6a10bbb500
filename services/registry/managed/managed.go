// Package managed computes objects' managedFields: which manager has set a field (KEP-555). It wraps upstream's field
// manager, and caches the managedFields of new objects by the objects' shape. It also caches the outcome of updates
// that change only strings and times, such as the renewal of a Lease. Upstream computes the managedFields of other
// updates, and of applies.
//
// All goroutines of the process share both caches, which have their own locks. The package starts no goroutine.
//
// # Review notes
//
//   - Objects of equal shape must have equal fields. Too long a shape costs time. Too short a shape gives an object the
//     fields of another object.
//   - Create must fall back to upstream if a shape is unsupported or too long.
//   - A cached outcome must depend only on values that are in the shape, or that Update compares (shape.omitted).
//   - TestCreatedFieldsAreUpstreams and TestUpdatedFieldsAreUpstreams compare Create and Update with upstream for every
//     built-in kind. A new walker needs values in their filler.
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

// FieldManager computes the managedFields of a RequestScope's objects.
type FieldManager struct {
	*managedfields.FieldManager
	number uint64 // 0: nothing is cached
}

var scopeNumbers atomic.Uint64

// New returns the field manager of a RequestScope. It wraps upstream's field manager.
func New(m *managedfields.FieldManager) *FieldManager { return &FieldManager{m, scopeNumbers.Add(1)} }

// Uncached returns the field manager of a RequestScope that a single request uses. It caches nothing, because no other
// request could use it.
func Uncached(m *managedfields.FieldManager) *FieldManager { return &FieldManager{m, 0} }

// Create sets the managedFields of a new object, which it may change: manager manages all its fields. The result is the
// same as UpdateNoErrors returns if empty's object is the live object. Objects of equal shape have equal fields, so
// Create computes the fields once. Pods of a template have equal shapes, and so do most objects that programs create.
func (f *FieldManager) Create(empty func() (runtime.Object, error), obj runtime.Object,
	manager string) (runtime.Object, error) {
	m, err := meta.Accessor(obj)
	// upstream encodes a manager as JSON, which does not preserve every name
	cacheable := f.number > 0 && err == nil && m.GetManagedFields() == nil && manager != "" && utf8.ValidString(manager)
	buffer := buffers.Get().(*[]byte)
	defer buffers.Put(buffer)
	var shape []byte
	if cacheable {
		shape, cacheable = f.shapeOf(*buffer, obj, nil)
		keepBuffer(buffer, shape)
	}
	if cacheable {
		if k, ok := cache.Get(hashShape(shape)); ok && k.shape == string(shape) {
			computed.WithLabelValues("create", "true").Inc()
			e := *k.entry.DeepCopy()
			e.Manager, e.Time = manager, &metav1.Time{Time: time.Now().UTC()}
			m.SetManagedFields([]metav1.ManagedFieldsEntry{e})
			return obj, nil
		}
	}
	computed.WithLabelValues("create", "false").Inc()
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
	// no entry: an error, or no field
	if entries := m.GetManagedFields(); len(entries) == 1 && entries[0].FieldsV1 != nil {
		cacheFields(shape, entries[0])
	}
	return obj, nil
}

// shapeOf returns the shape of an object of f, in a buffer. The shape begins with the number of f. omitted receives the
// values that the shape omits, unless it is nil. It returns false if the object has no shape.
func (f *FieldManager) shapeOf(buffer []byte, obj runtime.Object, omitted *[]string) ([]byte, bool) {
	s := shape{bytes: binary.AppendUvarint(buffer[:0], f.number), record: omitted != nil}
	ok := s.add(obj) && len(s.bytes) <= maxShapeBytes
	if omitted != nil {
		*omitted = s.omitted
	}
	return s.bytes, ok
}

// keepBuffer lets a pooled buffer grow with a shape, within bounds.
func keepBuffer(buffer *[]byte, shape []byte) {
	if cap(shape) <= 2*maxShapeBytes {
		*buffer = shape[:0]
	}
}

const (
	// maxShapeBytes bounds the shape of a cached entry, in bytes.
	maxShapeBytes = 16 << 10
	// cacheBytes bounds each of the process's two caches. entryOverhead and updateBytes approximate an entry's memory:
	// besides its contents, and of an update.
	cacheBytes    = 8 << 20
	entryOverhead = 300
	updateBytes   = 250
)

var buffers = sync.Pool{New: func() any { return new([]byte) }}

// cache maps a shape's hash to its managedFields. A shape begins with the number of its FieldManager, so scopes share
// no entries.
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

var computed = prometheus.NewCounterVec(prometheus.CounterOpts{
	Name: "watershed_registry_managed_fields_total",
	Help: "Creates, and updates and patches, whose managedFields were computed, by whether the outcome was in the " +
		"cache. Applies are not counted.",
}, []string{"operation", "cached"})

// Metrics returns the package's collectors.
func Metrics() []prometheus.Collector {
	return []prometheus.Collector{computed, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "watershed_registry_managed_fields_cache_bytes",
		Help: "Bytes of managedFields in the cache.",
	}, func() float64 { return float64(cache.Bytes() + updates.Bytes()) })}
}

// Validating restores managedFields from before admission if wrapped admission makes them invalid
// (k8s.io/apiserver/pkg/endpoints/handlers/fieldmanager/admission.go). It does not validate managedFields that
// admission has not changed.
type Validating struct{ admission.Interface }

// Admit implements admission.MutationInterface.
func (v Validating) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	mutating, ok := v.Interface.(admission.MutationInterface)
	if !ok {
		return nil
	}
	m, err := meta.Accessor(a.GetObject())
	if err != nil { // an object without metadata
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
