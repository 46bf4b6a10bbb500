package core

import (
	"flag"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

var (
	schedules = flag.Int("schedules", 2000, "the number of random schedules of TestSchedules")
	firstSeed = flag.Uint64("seed", 0, "the first seed of TestSchedules; with -schedules=1 -v its transcript is printed")
)

// TestSchedules runs random schedules of writes, faults and deliveries, from etcd to clients. Each client receives each
// event of its resource once and in order, or is expired. A failing seed prints its transcript.
func TestSchedules(t *testing.T) {
	for seed := *firstSeed; seed < *firstSeed+uint64(*schedules); seed++ {
		err := newSchedule(seed, nil).run()
		if err == nil && (*schedules > 1 || !testing.Verbose()) {
			continue
		}
		var trace strings.Builder
		_ = newSchedule(seed, &trace).run()
		t.Logf("seed %d: %v\n%s", seed, err, trace.String())
		if err != nil {
			t.FailNow()
		}
	}
}

// schedule is a random schedule of steps.
type schedule struct {
	*world
	rng *rand.Rand
	// restores: the schedule restores etcd. Then the log keeps its last event, by which a publisher recognizes etcd.
	// Otherwise the log may lose all messages by age.
	restores bool
	clients  int
}

func newSchedule(seed uint64, trace *strings.Builder) *schedule {
	s := &schedule{world: newWorld(), rng: rand.New(rand.NewPCG(seed, 0))}
	s.trace, s.keepsEnds = trace, seed%2 == 1
	s.restores = s.rng.IntN(2) == 0
	s.gateway.choose = func() *replica { return s.replicas[s.rng.IntN(len(s.replicas))] }
	if s.rng.IntN(2) == 0 {
		s.gateway.limit, s.gateway.retained = 4*(EntryBytes+4), EntryBytes
	}
	for _, name := range []string{"p", "q"} {
		s.publisher(name)
	}
	for _, name := range []string{"r1", "r2"} {
		s.replica(name).limit = 2 + s.rng.IntN(12)
	}
	for range s.rng.IntN(4) {
		s.write()
	}
	s.elect(s.publishers[0])
	return s
}

// run runs the schedule, ends all faults, and checks that every client is current.
func (s *schedule) run() error {
	for range 60 + s.rng.IntN(120) {
		if s.step(); s.err != nil {
			return s.err
		}
	}
	s.heal()
	if s.err == nil {
		for resource := range resourceCount {
			s.open("new-"+shortName(resourceNames[resource]), resource, s.etcd.revision())
			s.commit(write{resource: resource, name: "last"})
		}
		s.heal()
	}
	return s.err
}

func (s *schedule) chance(percent int) bool { return s.rng.IntN(100) < percent }

func (s *schedule) somePublisher() *publisher { return s.publishers[s.rng.IntN(len(s.publishers))] }

// step runs a random step.
func (s *schedule) step() {
	for _, p := range s.publishers {
		p.reader.checkEpoch(s.world)
	}
	switch n := s.rng.IntN(100); {
	case n < 12:
		s.write()
	case n < 40:
		s.publish(s.somePublisher())
	case n < 50:
		if len(s.flights) > 0 {
			s.fly(s.flights[s.rng.IntN(len(s.flights))])
		}
	case n < 58:
		s.read(s.replicas[s.rng.IntN(len(s.replicas))])
	case n < 62:
		s.read(s.somePublisher().reader)
	case n < 92:
		s.serve()
	default:
		s.fault()
	}
}

// write commits a transaction of a few writes.
func (s *schedule) write() {
	writes := make([]write, 0, 3)
	for n := 1 + s.rng.IntN(8)/5; n > 0; n-- {
		x := write{resource: s.rng.IntN(8) % resourceCount, name: string(rune('a' + s.rng.IntN(3)))}
		if x.resource == definitions && s.chance(60) {
			x.resource = pods
		}
		if s.etcd.generation > 0 { // a restored etcd does not repeat an event
			x.name += strconv.Itoa(s.etcd.generation)
		}
		switch r := s.rng.IntN(40); {
		case r < 6:
			x.kind = logv1.Type_TYPE_DELETED
		case r < 7:
			x.bad = true
		case r < 8:
			x.name = "large" + x.name
		}
		if !slices.ContainsFunc(writes, func(o write) bool { return o.resource == x.resource && o.name == x.name }) {
			writes = append(writes, x)
		}
	}
	s.commit(writes...)
}

// publish continues a publisher.
func (s *schedule) publish(p *publisher) {
	switch {
	case p.term == nil && s.etcd.leader == p.name:
		p.begin(s.world)
	case p.term == nil:
	case p.waits():
		switch n := s.rng.IntN(20); {
		case n < 12:
			p.receive(s.world)
		case n < 14:
			p.rotate(s.world)
		case n < 15:
			e, _ := s.etcd.record()
			p.term.Check(e, s.etcd.revision())
			p.term.PublishSums()
			p.watching(s.world)
		case n < 16:
			p.term.ForceProgress()
		default:
			p.acknowledge(s.world)
		}
	case p.term.Request.Op == AwaitAck:
		p.acknowledge(s.world)
	default:
		p.step(s.world, s.outcome())
	}
}

func (s *schedule) outcome() outcome {
	switch n := s.rng.IntN(60); n {
	case 0:
		return fails
	case 1:
		return loses
	case 2:
		return delays
	case 3, 4:
		return noSpace
	}
	return succeeds
}

// fly delivers messages of a flight.
func (s *schedule) fly(f *flight) {
	for n := 1 + s.rng.IntN(4); n > 0 && len(f.messages) > 0; n-- {
		f.deliver(s.world, 1+s.rng.IntN(4))
	}
	if len(f.messages) == 0 && !slices.ContainsFunc(s.publishers, func(p *publisher) bool { return p.flight == f }) {
		s.flights = slices.DeleteFunc(s.flights, func(o *flight) bool { return o == f })
	}
}

// read continues the reader of a replica.
func (s *schedule) read(r *replica) {
	if i := s.rng.IntN(resourceCount); r.objects[i] == nil {
		r.load(s.world, i)
	}
	switch n := s.rng.IntN(10); {
	case n < 6:
		for n := 1 + s.rng.IntN(3); n > 0; n-- {
			if r.live(s.world, r.reader.Sequence+1) != nil {
				r.catchUp(s.world)
			}
		}
	case n < 8: // a message before is missing, or the message is a duplicate
		if r.live(s.world, 1+s.rng.Uint64N(s.log.last()+1)) != nil && s.chance(70) {
			r.catchUp(s.world)
		}
	default:
		r.catchUp(s.world)
	}
}

// serve continues a stream, a broadcast or a client.
func (s *schedule) serve() {
	s.now = s.now.Add(time.Duration(s.rng.IntN(20)) * time.Second)
	open := slices.DeleteFunc(slices.Clone(s.gateway.clients), (*client).ended)
	if len(open) < 2 || s.chance(5) && len(open) < 6 {
		s.clients++
		resource := s.rng.IntN(8) % resourceCount
		revision := max(s.etcd.compacted, s.etcd.revision()-int64(s.rng.IntN(3)))
		c := s.open("c"+strconv.Itoa(s.clients), resource, revision)
		c.direct = s.chance(75)
		if s.chance(60) {
			c.result = func() writeResult { return writeResult(s.rng.IntN(8) % 4) }
		}
		return
	}
	c := open[s.rng.IntN(len(open))]
	b := c.in
	switch n := s.rng.IntN(16); {
	case c.own != nil:
		s.pump(c.own)
		c.step(s.world)
	case b == nil || n < 3:
		if b == nil || c.receiver.State == Active {
			c.step(s.world)
		}
	case n < 6:
		c.unblock(s.world)
	case n < 7:
		c.receiver.BookmarkNow()
	case n < 8:
		b.reassign(s.world, s.gateway.choose())
	case n < 10:
		b.replace(s.world)
	default:
		if b.stream != nil {
			s.pump(b.stream)
		}
		if b.next != nil {
			s.pump(b.next)
		}
		b.frame(s.world)
	}
}

func (s *schedule) pump(t *tierStream) {
	t.bookmarkDue = t.bookmarkDue || s.chance(30)
	t.pump(s.world, 1+s.rng.IntN(3))
}

// fault injects a fault.
func (s *schedule) fault() {
	w, p := s.world, s.somePublisher()
	r := s.replicas[s.rng.IntN(len(s.replicas))]
	n := s.rng.IntN(17)
	if (n == 0 || n >= 8 && n <= 12 || n == 14) && !s.noticed() {
		return
	}
	switch n {
	case 0:
		p.crash(w)
	case 1, 2:
		if s.etcd.leader != p.name {
			s.elect(p)
		}
	case 3:
		p.notice(w)
	case 4: // a publisher loses its lease and is elected again, without another leader
		if p.name == s.etcd.leader {
			p.end(w, "its lease is lost")
		}
	case 5:
		if len(s.etcd.delayed) > 0 {
			d := s.etcd.delayed[0]
			s.etcd.delayed = s.etcd.delayed[1:]
			s.writeEpoch(d)
		}
	case 6: // messages are lost on their way
		if len(s.flights) > 0 {
			f := s.flights[s.rng.IntN(len(s.flights))]
			if n := len(f.messages); n > 0 {
				i := s.rng.IntN(n)
				f.messages = slices.Delete(f.messages, i, i+1)
				if i == n-1 {
					f.rejected = true // no acknowledgement in time
				}
			}
		}
	case 7: // acknowledgements are lost
		if p.flight != nil && len(p.flight.acks) > 0 {
			p.flight.acks = nil
			p.end(w, "an acknowledgement is lost")
		}
	case 8, 9:
		n := len(s.log.stored)
		if s.restores { // the last event stays
			for n--; n > 0 && !IsChange(s.log.stored[n].events[0]); {
				n--
			}
		}
		if n > 0 {
			s.expire(s.rng.IntN(n + 1))
		}
	case 10:
		if n := len(s.log.stored); n > 0 {
			s.loseEnd(1 + s.rng.IntN(min(n, 4)))
		}
	case 11:
		if s.chance(40) {
			s.recreate()
		}
	case 12:
		for range 4 { // most revisions are unsuitable
			if s.restores && s.chance(50) && s.noticed() {
				s.tryRestore()
			}
		}
	case 13:
		r.restart(w)
	case 14:
		revision := s.etcd.revision() - int64(s.rng.IntN(6))
		if p.waits() && s.chance(50) { // etcd has the publisher's next event, and not the object's state before it
			revision = p.next
		}
		s.compact(revision)
	case 15:
		if n := len(s.log.stored); n > 0 && !s.restores {
			s.corrupt(s.log.before + 1 + s.rng.Uint64N(uint64(n)))
		}
	case 16:
		if cs := s.gateway.clients; len(cs) > 0 {
			if c := cs[s.rng.IntN(len(cs))]; !c.ended() {
				c.close(w, "the client leaves")
			}
		}
		for _, b := range s.gateway.broadcasts {
			if b != nil && len(b.receivers) == 0 {
				b.end(w)
			}
		}
	}
}

// noticed returns whether a publisher has noticed that etcd was restored. Until then the log and the registries lose
// nothing, and etcd is not compacted. Each could hide the restore: the publisher could not compare the log's last event
// with etcd.
func (s *schedule) noticed() bool {
	for _, generation := range s.gateway.epochs {
		if generation == s.etcd.generation {
			return true
		}
	}
	return s.etcd.generation == 0
}

// tryRestore restores etcd to a revision, if a publisher can find out: the restored etcd has another token than the
// log, or lacks its last event. If the log is lost too, the end that the registries have read replaces the log's end.
func (s *schedule) tryRestore() {
	to := s.etcd.revision() - 1 - int64(s.rng.IntN(8))
	if to < s.etcd.compacted {
		return
	}
	lost := s.chance(50) // the log is lost with etcd
	record, _ := s.etcd.recordAt(to)
	var observed []LogEnd
	log := s.log.end()
	log.Empty = log.Empty || lost
	for _, p := range s.publishers {
		for _, k := range p.reader.ends() {
			if log.Empty || k.end.Last.Revision > log.Last.Revision {
				observed = append(observed, k.end)
			}
		}
	}
	if hidden([]LogEnd{log}, record, to) || hidden(observed, record, to) {
		return
	}
	if lost {
		s.recreate()
	}
	s.restore(to)
	for _, c := range s.gateway.clients { // a resourceVersion of another epoch is not recognized
		if !c.ended() && c.place.Position().Epoch == "" {
			c.close(s.world, "its list is of another epoch")
		}
	}
}

// hidden returns whether ends of the log do not differ from etcd with a record, restored to a revision. A token of any
// end at the last revision may match.
func hidden(ends []LogEnd, record Epoch, to int64) bool {
	var last, furthest int64
	for _, end := range ends {
		if !end.Empty && (end.Progress == nil || end.Progress.Epoch == record.ID) {
			last, furthest = max(last, end.Event.Revision), max(furthest, end.Last.Revision)
		}
	}
	return slices.ContainsFunc(ends, func(end LogEnd) bool {
		p := end.Progress
		return !end.Empty && last <= to && end.Last.Revision == furthest && (p == nil ||
			p.Epoch == record.ID && (p.FencingToken == record.Token || p.NextFencingToken == record.Token))
	})
}

// heal ends all faults and lets every part continue until all are current.
func (s *schedule) heal() {
	w := s.world
	for _, c := range s.gateway.clients {
		c.result = nil
	}
	leader := s.publisher(s.etcd.leader)
	for _, p := range s.publishers {
		p.notice(w)
	}
	s.flights = slices.DeleteFunc(s.flights, func(f *flight) bool { return f != leader.flight })
	if !s.settle(leader) {
		s.violated("%s does not publish", leader.name)
	}
	for _, r := range s.replicas {
		r.catchUp(w)
	}
	for range 30 {
		s.now = s.now.Add(time.Second)
		for _, c := range s.gateway.clients {
			if c.own != nil {
				c.own.pump(w, 100)
			}
			if c.in == nil || c.receiver.State == Active {
				c.step(w)
			}
			c.unblock(w)
		}
		for _, b := range s.gateway.broadcasts {
			if b == nil {
				continue
			}
			b.next = nil
			b.stream.pump(w, 100)
			for len(b.stream.frames) > 0 || b.stream.broken() {
				b.frame(w)
			}
		}
	}
	if s.err == nil {
		s.check()
	}
}

// settle lets a publisher publish all of etcd's events, and progress as it does while etcd is idle.
func (s *schedule) settle(p *publisher) bool {
	w, idle := s.world, false
	for range 200 {
		switch {
		case p.term == nil:
			idle = false
			p.begin(w)
		case len(p.flight.messages) > 0:
			p.flight.deliver(w, 4)
		case len(p.flight.acks) > 0 || p.flight.rejected:
			p.acknowledge(w)
		case p.waits() && p.next > s.etcd.revision() && !idle:
			idle = true
			p.term.ForceProgress()
			p.receive(w)
		case p.waits() && idle:
			return true
		case p.waits():
			p.receive(w)
		default:
			p.step(w, succeeds)
		}
	}
	return false
}

// check checks that the replicas agree with etcd, and that every client has every event.
func (s *schedule) check() {
	now := &s.etcd.timelines[s.etcd.generation]
	for _, r := range s.replicas {
		if r.core.Progress < s.etcd.revision() {
			s.violated("%s has applied revision %d of %d", r.name, r.core.Progress, s.etcd.revision())
		}
		for resource := range r.rings {
			s.checkRing(r, resource, now)
		}
	}
	for _, c := range s.gateway.clients {
		if last := now.last(c.resource, s.etcd.revision()); !c.ended() && c.last != last {
			s.violated("%s has event %d, and lacks event %d", c.name, c.last, last)
		}
	}
}

// checkRing checks that a ring has every event after the position that it holds.
func (s *schedule) checkRing(r *replica, resource int, now *timeline) {
	ring := &r.rings[resource]
	held := ring.All()
	for i := len(now[resource]) - 1; i >= 0; i-- {
		e := now[resource][i]
		n := len(held) - 1
		if n < 0 || held[n].id != e.id {
			if e.revision > ring.Low.Revision {
				s.violated("%s lacks event %d of %s at revision %d", r.name, e.id, resourceNames[resource], e.revision)
			}
			return
		}
		held = held[:n]
	}
	if len(held) > 0 {
		s.violated("%s has %d events of %s that etcd lacks", r.name, len(held), resourceNames[resource])
	}
}
