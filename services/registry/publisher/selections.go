package publisher

import (
	"hash/maphash"
	"strconv"
	"weak"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"watershed.dev/platform/lru"
	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/storage"
)

// selections caches hashes of the labels and fields of published objects. Most changes of an object leave them as
// they were. The publisher then need not decode the object before the change. The zero value is empty.
type selections struct {
	seed  maphash.Seed
	byKey *lru.Cache[string, selection]
}

// selection is the state of an object. A CRD that has changed has another resource, and the pointer keeps no old CRD.
type selection struct {
	resource weak.Pointer[storage.Resource]
	revision int64
	hash     uint64
}

const (
	// selectionsBytes bounds the memory of selections: about 13,000 objects.
	selectionsBytes = 4 << 20
	// selectionBytes is the memory of a selection without its key.
	selectionBytes = 256
)

// record caches the labels and fields of an event's object. It returns false if the object before the event has the
// cached revision, and had the same labels and fields. Otherwise they may differ.
func (s *selections) record(e *mvccpb.Event, st *storage.Resource, o *logv1.Object) bool {
	if s.byKey == nil {
		s.seed, s.byKey = maphash.MakeSeed(), lru.New[string, selection](selectionsBytes)
	}
	key := string(e.Kv.Key)
	if e.Type == mvccpb.DELETE {
		s.byKey.RemoveIf(key, func(selection) bool { return true })
		return true
	}
	now := selection{weak.Make(st), e.Kv.ModRevision, s.hash('l', o.Labels) + s.hash('f', o.Fields)}
	before, ok := s.byKey.Get(key)
	s.byKey.Put(key, now, selectionBytes+len(key))
	if !ok || e.PrevKv == nil || !st.SelectsStored() {
		return true
	}
	return before != selection{now.resource, e.PrevKv.ModRevision, now.hash}
}

// hash returns the sum of the hashes of a map's entries. The seed is random, so clients cannot construct two maps with
// the same hash.
func (s *selections) hash(kind byte, of map[string]string) (sum uint64) {
	var h maphash.Hash
	h.SetSeed(s.seed)
	for k, v := range of {
		h.Reset()
		_ = h.WriteByte(kind)
		_, _ = h.WriteString(strconv.Itoa(len(k)))
		_ = h.WriteByte(' ')
		_, _ = h.WriteString(k)
		_, _ = h.WriteString(v)
		sum += h.Sum64()
	}
	return sum
}
