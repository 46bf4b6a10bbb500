package managed

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strconv"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"watershed.dev/platform/lru"
)

// updateKey is a sum of everything that the managedFields of an update depend on. Tenants choose the contents of it.
type updateKey [sha256.Size]byte

// updates maps updates to the index of the only entry that changes: it gets a new time.
var updates = newUpdates()

func newUpdates() *lru.Cache[updateKey, int] { return lru.New[updateKey, int](cacheBytes) }

// Update sets the managedFields of an object that replaces live, as UpdateNoErrors does. It changes obj only.
//
// Many updates change only strings and times outside lists, of which their manager already manages all: a node renews
// its Lease. The only change of their managedFields is a time, which Update caches. Upstream walks both objects several
// times.
func (f *FieldManager) Update(live, obj runtime.Object, manager string) runtime.Object {
	m, err := meta.Accessor(obj)
	if err != nil || f.number == 0 {
		computed.WithLabelValues("update", "false").Inc()
		return f.UpdateNoErrors(live, obj, manager)
	}
	entries := liveEntries(live, m)
	key, cacheable := f.updateKey(live, obj, entries, manager)
	i, cached := 0, false
	if cacheable {
		i, cached = updates.Get(key)
	}
	computed.WithLabelValues("update", strconv.FormatBool(cached)).Inc()
	if cached {
		m.SetManagedFields(renewed(entries, i))
		return obj
	}
	obj = f.UpdateNoErrors(live, obj, manager)
	if cacheable {
		if i, ok := onlyRenewed(entries, m.GetManagedFields()); ok {
			updates.Put(key, i, updateBytes)
		}
	}
	return obj
}

// liveEntries returns the managedFields of a live object. It returns none if the new object has other managedFields,
// or resets them with an empty list: upstream then uses these.
func liveEntries(live runtime.Object, sent metav1.Object) []metav1.ManagedFieldsEntry {
	l, err := meta.Accessor(live)
	if err != nil {
		return nil
	}
	entries := l.GetManagedFields()
	if s := sent.GetManagedFields(); s != nil && !slices.EqualFunc(s, entries, equalEntriesAndTimes) {
		return nil
	}
	return entries
}

// updateKey returns the key of an update: the manager, the live entries without their times, the shape of both objects,
// and the fields whose values differ. It returns false if the managedFields may depend on something else, as they do if
// the shapes differ.
func (f *FieldManager) updateKey(live, obj runtime.Object, entries []metav1.ManagedFieldsEntry, manager string) (
	key updateKey, ok bool) {
	if !keyable(entries) {
		return key, false
	}
	first, second := buffers.Get().(*[]byte), buffers.Get().(*[]byte)
	defer buffers.Put(first)
	defer buffers.Put(second)
	var before, after []string
	shape, ok := f.shapeOf(*first, live, &before)
	keepBuffer(first, shape)
	if !ok {
		return key, false
	}
	sum, ok := f.shapeOf(*second, obj, &after)
	defer func() { keepBuffer(second, sum) }()
	if !ok || !bytes.Equal(shape, sum) || slices.Equal(before, after) {
		return key, false
	}
	sum = binary.AppendUvarint(appendText(sum, manager), uint64(len(entries))) // no shape is the prefix of another
	for _, e := range entries {
		sum = appendText(appendText(sum, e.Manager), string(e.Operation))
		sum = appendText(appendText(sum, e.APIVersion), e.Subresource)
		sum = appendText(appendText(sum, e.FieldsType), e.FieldsV1.GetRawString())
	}
	for i, text := range before {
		if text != after[i] {
			sum = binary.AppendUvarint(sum, uint64(i))
		}
	}
	return sha256.Sum256(sum), true
}

// maxEntries bounds the entries of a key, which are compared with each other.
const maxEntries = 32

// keyable returns whether a key may have the entries. Upstream merges entries of the same manager. Entries of several
// versions need conversions, which depend on values.
func keyable(entries []metav1.ManagedFieldsEntry) bool {
	if len(entries) == 0 || len(entries) > maxEntries {
		return false
	}
	size := 0
	for i, e := range entries {
		size += len(e.FieldsV1.GetRawString())
		if e.Time == nil || e.APIVersion != entries[0].APIVersion || size > 4*maxShapeBytes ||
			slices.ContainsFunc(entries[:i], func(other metav1.ManagedFieldsEntry) bool {
				return e.Manager == other.Manager && e.Operation == other.Operation &&
					e.Subresource == other.Subresource
			}) {
			return false
		}
	}
	return true
}

// appendText appends text with its length.
func appendText(dst []byte, text string) []byte {
	return append(binary.AppendUvarint(dst, uint64(len(text))), text...)
}

// renewed returns a copy of entries with the current time in entry i, in upstream's order
// (k8s.io/apimachinery/pkg/util/managedfields/internal, sortEncodedManagedFields).
func renewed(entries []metav1.ManagedFieldsEntry, i int) []metav1.ManagedFieldsEntry {
	out := make([]metav1.ManagedFieldsEntry, len(entries))
	for j := range entries {
		entries[j].DeepCopyInto(&out[j])
	}
	out[i].Time = &metav1.Time{Time: time.Now().UTC()}
	slices.SortFunc(out, func(p, q metav1.ManagedFieldsEntry) int {
		return cmp.Or(cmp.Compare(p.Operation, q.Operation), cmp.Compare(p.Time.Unix(), q.Time.Unix()),
			cmp.Compare(p.Manager, q.Manager), cmp.Compare(p.APIVersion, q.APIVersion),
			cmp.Compare(p.Subresource, q.Subresource))
	})
	return out
}

// onlyRenewed returns the index of the entry that has another time after an update. It returns false unless that is the
// only change.
func onlyRenewed(before, after []metav1.ManagedFieldsEntry) (index int, ok bool) {
	changed := -1
	for i, e := range before {
		same := func(other metav1.ManagedFieldsEntry) bool { return equalEntriesAndTimes(e, other) }
		if !slices.ContainsFunc(after, same) {
			if changed >= 0 {
				return 0, false
			}
			changed = i
		}
	}
	return changed, changed >= 0 && len(before) == len(after) &&
		slices.ContainsFunc(after, func(e metav1.ManagedFieldsEntry) bool { return equalEntries(e, before[changed]) })
}

func equalEntriesAndTimes(a, b metav1.ManagedFieldsEntry) bool {
	return equalEntries(a, b) && a.Time.Equal(b.Time)
}
