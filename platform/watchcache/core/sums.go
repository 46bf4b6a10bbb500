package core

import (
	"github.com/cespare/xxhash/v2"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// maxSums bounds the resources of a message with sums. The others follow in the next.
const maxSums = 1000

// ObjectHash returns an object's part of its resource's sum. key is "namespace/name", or "name". A sum detects with
// near certainty that a reader has missed, repeated or invented a change. It is no protection against an attacker.
func ObjectHash(key string, revision int64) uint64 {
	h := xxhash.Sum64String(key) ^ uint64(revision)*0x9e3779b97f4a7c15
	h ^= h >> 33 // the finalizer of MurmurHash3: revisions that follow each other have unrelated hashes
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// sums are the changes of the resources' sums since a term began.
type sums struct {
	term    uint64
	changes map[string]uint64
	// unsent are the resources that have changed since the last message with sums.
	unsent map[string]struct{}
}

func newSums(nonce string) sums {
	return sums{term: xxhash.Sum64String(nonce), changes: map[string]uint64{}, unsent: map[string]struct{}{}}
}

// add adds the changes of a transaction. A change that cannot be published counts too, because readers then read the
// object from etcd.
func (s *sums) add(changes []Change) {
	for _, c := range changes {
		if c.Resource == "" {
			continue
		}
		if c.Previous != 0 {
			s.changes[c.Resource] -= ObjectHash(c.Object, c.Previous)
		}
		if !c.Deleted {
			s.changes[c.Resource] += ObjectHash(c.Object, c.Revision)
		}
		s.unsent[c.Resource] = struct{}{}
	}
}

// take returns the sums for a message, or nil if none has changed.
func (s *sums) take() *logv1.Sums {
	if len(s.unsent) == 0 {
		return nil
	}
	m := &logv1.Sums{Term: s.term, Changes: map[string]uint64{}}
	for name := range s.unsent {
		if len(m.Changes) == maxSums {
			break
		}
		m.Changes[name] = s.changes[name]
		delete(s.unsent, name)
	}
	return m
}

// PublishSums publishes the changed sums, so that readers compare them with their own.
func (t *Term) PublishSums() {
	if t.Request.Op == WatchEtcd && len(t.sums.unsent) > 0 {
		t.appendControl(&logv1.Event{Revision: t.chain.Last.Revision})
	}
}

// SumsAt returns the sums of an event that the replica has applied. It returns nil if the replica is not at the
// event's position: the log lost its end, and the replica had applied more.
func (c *Replica) SumsAt(e *logv1.Event) *logv1.Sums {
	if e.Revision != c.Progress || c.partial.Revision > e.Revision || len(c.pending) > 0 {
		return nil
	}
	return e.Sums
}

// SumChecker compares the sum of a resource's objects with a publisher's. The zero value has compared nothing.
type SumChecker struct {
	// Sum is the sum of the objects. Its owner keeps it.
	Sum uint64
	// base is the sum when the publisher's term began.
	term, base uint64
}

// Differs returns true if the objects have changed otherwise than the publisher states, since the last comparison of
// the same term.
func (a *SumChecker) Differs(term, change uint64) bool {
	before := *a
	a.term, a.base = term, a.Sum-change
	return before.term == a.term && before.base != a.base
}
