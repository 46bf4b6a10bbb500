package core

import (
	"strconv"
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

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
		pods := &resourceSums{}
		publisher.resources["pods"] = pods
		if c.next.Revision > 11 {
			publisher.add([]Change{change(11, 0)})
			replica.Sum = ObjectHash("x/a", 11)
		}
		replica.Differs(publisher.term, pods.change) // takes the base
		publisher.add([]Change{c.next})
		replica.Sum = ObjectHash("x/a", c.next.Revision)
		if got := replica.Differs(publisher.term, pods.change); got != c.want {
			t.Errorf("%s: the sums differ: %v", name, got)
		}
	}
}

// A replica that misses the first change of a resource in a publisher's term differs from the next sums.
func TestAMissedFirstChangeOfATermIsFound(t *testing.T) {
	for name, c := range map[string]struct {
		// event: the log ends with an event when the term begins.
		event, misses bool
	}{
		"nothing is missed":                {false, false},
		"nothing is missed after an event": {true, false},
		"missed":                           {false, true},
		"missed after an event":            {true, true},
	} {
		s := &transcript{world: newWorld()}
		p, r := s.publisher("p"), s.replica("r")
		s.elect(p)
		s.commit(write{resource: configMaps, name: "a"}, write{resource: pods, name: "a"})
		s.settle(p)
		if p.end(s.world, ""); c.event {
			s.loseEnd(1)
		}
		r.catchUp(s.world)
		r.load(s.world, pods)
		s.commit(write{resource: pods, name: "a"})
		s.settle(p)
		for _, m := range s.log.stored {
			if e := m.events[0]; c.misses && e.Type == logv1.Type_TYPE_MODIFIED {
				m.events[0] = &logv1.Event{Revision: e.Revision, Epoch: e.Epoch}
			}
		}
		r.catchUp(s.world)
		if (s.err != nil) != c.misses {
			t.Errorf("%s: %v", name, s.err)
		}
	}
}

// A replica that has started in a term has complete sums after the next rotation of the fencing token.
func TestSumsAreCompleteAfterARotation(t *testing.T) {
	s := &transcript{world: newWorld()}
	p := s.publisher("p")
	s.elect(p)
	s.commit(write{resource: pods, name: "a"})
	s.settle(p)
	p.term.PublishSums()
	p.rotate(s.world)
	s.settle(p)
	var sums []*logv1.Sums
	for _, m := range s.log.stored {
		if m.events[0].Sums != nil {
			sums = append(sums, m.events[0].Sums)
		}
	}
	if len(sums) != 3 || !sums[0].Complete || len(sums[0].Changes) != 0 || sums[1].Complete ||
		!sums[2].Complete || sums[2].Changes["pods"] == 0 || sums[2].Changes["pods"] != sums[1].Changes["pods"] {
		t.Errorf("the log has the sums %v", sums)
	}
}

// A replica knows the change of a sum only if it has received all sums of the term before it.
func TestSumsOfATermAreKnownAfterACompleteMessage(t *testing.T) {
	of := func(term uint64, complete bool, changes map[string]uint64) *logv1.Sums {
		return &logv1.Sums{Term: term, Complete: complete, Changes: changes}
	}
	many := map[string]uint64{"pods": 9}
	for i := len(many); i < maxSums; i++ {
		many["r"+strconv.Itoa(i)] = 1
	}
	var s TermSums
	for revision, step := range []struct {
		about  string
		sums   *logv1.Sums
		newest int64
		change uint64
		known  bool
	}{
		{"nothing is received", nil, 0, 0, false},
		{"sums of a term that began before", of(7, false, map[string]uint64{"pods": 3}), 0, 0, false},
		{"complete sums", of(7, true, map[string]uint64{"pods": 4}), 2, 4, true},
		{"other resources changed", of(7, false, map[string]uint64{"nodes": 5}), 3, 4, true},
		{"a later event", of(7, false, map[string]uint64{"pods": 5}), 5, 5, false},
		{"a part of the sums", of(7, false, many), 5, 9, false},
		{"events before that part", of(7, false, many), 4, 9, true},
		{"complete sums without a change", of(8, true, nil), 7, 0, true},
		{"another term", of(9, false, map[string]uint64{"pods": 1}), 0, 0, false},
		{"complete again", of(9, true, map[string]uint64{"pods": 1}), 0, 1, true},
		{"sums of an earlier position", nil, 0, 0, false},
		{"sums of no term", of(0, false, map[string]uint64{"pods": 1}), 0, 0, false},
	} {
		s.Receive(step.sums, int64(revision))
		if _, change, known := s.Change("pods", step.newest); change != step.change || known != step.known {
			t.Errorf("%s: change %d, known: %v", step.about, change, known)
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

func BenchmarkSums(b *testing.B) {
	s := newSums("n")
	c := []Change{{Resource: "pods", Object: "some-namespace/some-deployment-7d9f8c7b5-x2x4z"}}
	for b.Loop() {
		c[0].Previous, c[0].Revision = c[0].Revision, c[0].Revision+1
		s.add(c)
	}
}
