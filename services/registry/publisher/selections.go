package publisher

import (
	"hash/maphash"
	"strconv"
	"weak"

	"go.etcd.io/etcd/api/v3/mvccpb"

	logv1 "watershed.dev/proto/watershed/log/v1"
	"watershed.dev/services/registry/storage"
)

// selections caches hashes of the labels and fields of published objects. Most changes of an object leave them as
// they were. The publisher then need not decode the object before the change. The zero value is empty.
//
// It is an array. An allocation for each key would lie between the objects of events, and Go's heap could not return
// their memory.
type selections struct {
	seed maphash.Seed
	sets *[selectionSets][2]selection
}

// selectionSets is the number of sets, which take 1 MB. A set has the last two keys whose hash selects it.
const selectionSets = 1 << 14

// selection is the state of an object. A CRD that has changed has another resource, and the pointer keeps no old CRD.
type selection struct {
	// key is the hash of the object's key, or 0.
	key      uint64
	revision int64
	hash     uint64
	resource weak.Pointer[storage.Resource]
}

// record caches the labels and fields of an event's object. It returns false if the object before the event has the
// cached revision, and had the same labels and fields. Otherwise they may differ.
func (s *selections) record(e *mvccpb.Event, st *storage.Resource, o *logv1.Object) bool {
	if s.sets == nil {
		s.seed, s.sets = maphash.MakeSeed(), new([selectionSets][2]selection)
	}
	key := maphash.Bytes(s.seed, e.Kv.Key)
	set := &s.sets[key%selectionSets]
	if set[1].key == key {
		set[0], set[1] = set[1], set[0]
	}
	before := set[0]
	switch found := before.key == key; {
	case e.Type == mvccpb.DELETE && found:
		set[0] = selection{}
		return true
	case e.Type == mvccpb.DELETE:
		return true
	case !found:
		before, set[1] = selection{}, set[0]
	}
	set[0] = selection{key, e.Kv.ModRevision, s.hash('l', o.Labels) + s.hash('f', o.Fields), weak.Make(st)}
	if e.PrevKv == nil || !st.SelectsStored() {
		return true
	}
	return before != selection{key, e.PrevKv.ModRevision, set[0].hash, set[0].resource}
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
