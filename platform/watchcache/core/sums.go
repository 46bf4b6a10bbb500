package core

import (
	"maps"

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

// sums are the sums of all resources' changes and events since a term began.
type sums struct {
	term      uint64
	resources map[string]*resourceSums
	// unsent are the resources that have changed since the last message with sums.
	unsent []string
	// begun: a message with sums was published. due: the next such message must be complete, if it is not too large.
	begun, due bool
}

// resourceSums are the sums of a resource (logv1.Sums).
type resourceSums struct {
	change, events uint64
	unsent         bool
}

func newSums(nonce string) sums {
	return sums{term: xxhash.Sum64String(nonce), resources: map[string]*resourceSums{}, due: true}
}

// add adds the changes of a transaction. A change that cannot be published counts too, because readers then read the
// object from etcd.
func (s *sums) add(changes []Change) {
	for _, c := range changes {
		if c.Resource == "" {
			continue
		}
		of := s.resources[c.Resource]
		if of == nil {
			of = &resourceSums{}
			s.resources[c.Resource] = of
		}
		if c.Previous != 0 {
			of.change -= ObjectHash(c.Object, c.Previous)
		}
		hash := ObjectHash(c.Object, c.Revision)
		if !c.Deleted {
			of.change += hash
		}
		of.events += hash
		if !of.unsent {
			of.unsent, s.unsent = true, append(s.unsent, c.Resource)
		}
	}
}

// take returns the sums for a message, or nil if none has changed and no complete message is due.
func (s *sums) take() *logv1.Sums {
	s.begun = true
	m := &logv1.Sums{Term: s.term, Changes: map[string]uint64{}, Events: map[string]uint64{}}
	if s.due && len(s.resources) <= maxSums {
		s.due, m.Complete = false, true
		for name := range s.resources {
			s.put(m, name)
		}
		s.unsent = nil
		return m
	}
	if len(s.unsent) == 0 {
		return nil
	}
	n := min(len(s.unsent), maxSums)
	for _, name := range s.unsent[:n] {
		s.put(m, name)
	}
	s.unsent = s.unsent[n:]
	return m
}

// put adds the sums of a resource to a message.
func (s *sums) put(m *logv1.Sums, name string) {
	of := s.resources[name]
	m.Changes[name], m.Events[name], of.unsent = of.change, of.events, false
}

// beginSums publishes the first message with sums, unless the log may end within a transaction. A replica then compares
// each later change of the term.
func (t *Term) beginSums() {
	if !t.sums.begun && t.betweenTransactions() {
		t.appendControl(&logv1.Event{Revision: t.chain.Last.Revision})
	}
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

// TermSums are the changes of all resources' sums in a publisher's term, as a replica has received them. The zero value
// has received none.
type TermSums struct {
	term    uint64 // 0: the changes of some resources are unknown
	changes map[string]uint64
	// revision is the position of the changes.
	revision int64
}

// Receive receives the sums of a message at a revision. m is nil if the replica is not at the message's position.
func (s *TermSums) Receive(m *logv1.Sums, revision int64) {
	switch {
	case m != nil && m.Complete:
		*s = TermSums{m.Term, map[string]uint64{}, revision}
	case m == nil || m.Term != s.term || s.term == 0:
		*s = TermSums{}
		return
	case len(m.Changes) < maxSums: // otherwise other resources may have changed too
		s.revision = revision
	}
	maps.Copy(s.changes, m.Changes)
}

// Change returns the change of a resource's sum in the term. ok is false if it is unknown at newest, the revision of
// the resource's newest event or reset.
func (s *TermSums) Change(resource string, newest int64) (term, change uint64, ok bool) {
	return s.term, s.changes[resource], s.term != 0 && newest <= s.revision
}

// SumChecker compares the sum of a resource's objects, or of its events, with a publisher's. The zero value has
// compared nothing.
type SumChecker struct {
	// Sum is the sum of the objects or events. Its owner keeps it.
	Sum uint64
	// base is the sum when the publisher's term began.
	term, base uint64
}

// Differs returns true if the sum has changed otherwise than the publisher states, since the last comparison of
// the same term.
func (a *SumChecker) Differs(term, change uint64) bool {
	before := *a
	a.term, a.base = term, a.Sum-change
	return before.term == a.term && before.base != a.base
}
