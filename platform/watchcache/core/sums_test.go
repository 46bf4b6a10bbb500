package core

import "testing"

// If etcd's watch loses an event (etcd #17529), the log lacks it, and every replica too. The next event of the same
// object names the lost revision as the previous revision, so the sums differ. A lost deletion followed by a creation
// differs too.
func TestALostEventOfEtcdIsFound(t *testing.T) {
	change := func(revision, previous int64) Change {
		return Change{EtcdEvent: EtcdEvent{Revision: revision}, Resource: "pods", Object: "x/a", Previous: previous}
	}
	for name, c := range map[string]struct {
		next Change
		want bool
	}{
		"nothing is lost":     {change(13, 11), false},
		"an update is lost":   {change(13, 12), true},
		"a deletion is lost":  {change(13, 0), true},
		"a creation is found": {change(11, 0), false},
	} {
		publisher, replica := newSums("n"), SumChecker{}
		if c.next.Revision > 11 {
			publisher.add([]Change{change(11, 0)})
			replica.Sum = ObjectHash("x/a", 11)
		}
		replica.Differs(publisher.term, publisher.changes["pods"]) // takes the base
		publisher.add([]Change{c.next})
		replica.Sum = ObjectHash("x/a", c.next.Revision)
		if got := replica.Differs(publisher.term, publisher.changes["pods"]); got != c.want {
			t.Errorf("%s: the sums differ: %v", name, got)
		}
	}
}

// Readers ignore an event up to the last progress, so the log is reset if etcd sends such an event.
func TestAnEventAfterItsProgressResetsTheLog(t *testing.T) {
	term := &Term{}
	term.Request = Request{Op: WatchEtcd}
	term.chain.Last = ID{Revision: 9, Progress: true}
	term.Transaction([]Change{{EtcdEvent: EtcdEvent{Key: "/registry/a", Revision: 9}}})
	if term.Request.Op != ReadRevision {
		t.Errorf("the term requests %+v", term.Request)
	}
}
