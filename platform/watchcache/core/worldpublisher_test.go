package core

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// publisher is a candidate in the election, and its term.
type publisher struct {
	name string
	core Publisher
	// reader reads the log, as the publisher's process does.
	reader *replica
	// observed is etcd's epoch when the term read the observed ends, if a registry had read the log of that epoch.
	observed string
	term     *Term
	flight   *flight
	// next is the next revision of the term's watch.
	next int64
	// number is the number of the term. tokens numbers its fencing tokens.
	number, tokens int
}

// flight is messages of a term on their way to the log, and acknowledgements on their way back.
type flight struct {
	owner    string
	messages []LogEntry
	acks     []ID
	rejected bool
}

var (
	errBad   = errors.New("rubbish")
	errLarge = errors.New("too large")
)

func (w *world) publisher(name string) *publisher {
	for _, p := range w.publishers {
		if p.name == name {
			return p
		}
	}
	p := &publisher{name: name, reader: &replica{name: name, limit: 8}}
	w.publishers = append(w.publishers, p)
	return p
}

// elect makes a publisher the leader. Another leader may not have noticed.
func (w *world) elect(p *publisher) {
	if p.name != w.etcd.leader {
		p.end(w, "")
	}
	w.etcd.leader = p.name
	p.core.Elected()
	if w.trace != nil {
		w.tracef("%s: is elected", p.name)
	}
}

// notice makes a publisher read the election's key.
func (p *publisher) notice(w *world) {
	if w.etcd.leader == p.name {
		return
	}
	p.end(w, "its lease is lost")
}

// crash kills the publisher's process.
func (p *publisher) crash(w *world) {
	p.end(w, "killed")
	kept, read := p.reader.kept, p.reader.observed.End()
	if p.reader.replaced {
		kept = &keptEnd{read, p.reader.reader}
	}
	stays := kept != nil && (read.Empty || kept.end.has(read))
	if log := w.log.end(); !stays && (log.Empty || !read.Empty && !log.has(read)) {
		w.excuse() // nothing else proves that etcd is unchanged
	}
	p.core = Publisher{}
	p.reader = &replica{name: p.name, limit: 8, kept: kept}
}

// has returns whether the log's end has the revision and the tokens of another end.
func (l *LogEnd) has(other LogEnd) bool {
	p, o := l.Progress, other.Progress
	return l.Last.Revision >= other.Last.Revision && p != nil && p.FencingToken == o.FencingToken &&
		p.NextFencingToken == o.NextFencingToken
}

// end ends the publisher's term. Its messages in flight may still arrive.
func (p *publisher) end(w *world, reason string) {
	if p.term == nil {
		return
	}
	p.term, p.flight = nil, nil
	p.core.TermFailed(w.now)
	if w.trace != nil && reason != "" {
		w.tracef("%s: the term ends: %s", p.name, reason)
	}
}

// begin begins a term.
func (p *publisher) begin(w *world) {
	w.terms++
	p.number, p.tokens = w.terms, 1
	fresh := Epoch{ID: "E" + strconv.Itoa(w.terms), Token: "T" + strconv.Itoa(w.terms)}
	p.term = p.core.Begin(p.name+strconv.Itoa(w.terms)+"-", fresh, encodeEvent)
	p.flight, p.next = &flight{owner: p.name}, 0
	w.flights = append(w.flights, p.flight)
	if w.trace != nil {
		w.tracef("%s: begins a term", p.name)
	}
}

// rotate rotates the fencing token.
func (p *publisher) rotate(w *world) {
	p.tokens++
	p.term.Rotate("T" + strconv.Itoa(p.number) + "." + strconv.Itoa(p.tokens))
	p.watching(w)
}

func encodeEvent(e *logv1.Event) (any, error) {
	if strings.HasPrefix(e.Name, "large") {
		return nil, errLarge
	}
	return nil, nil
}

// send takes the term's messages.
func (p *publisher) send(w *world) {
	for _, m := range p.term.TakeEntries() {
		if w.trace != nil {
			expects := "expects " + m.Expected.String()
			if m.First {
				expects = fmt.Sprintf("expects the sequence %d", m.Begin)
			}
			w.tracef("%s: sends %v: %s; %s", p.name, m.ID, describeEvent(m.Event), expects)
			if m.ID.Progress && m.Event.Type == logv1.Type_TYPE_RESET {
				w.tracef("%s: the log %s: %s", p.name, p.term.Decision, p.term.Reason)
			}
		}
		p.flight.messages = append(p.flight.messages, m)
	}
}

// outcome is the fate of a request.
type outcome int

const (
	succeeds outcome = iota
	// fails: the request has no effect.
	fails
	// loses: the request has its effect, and its response is lost.
	loses
	// delays: the request has its effect later, and its response is lost.
	delays
	// noSpace: etcd rejects a write, because it has no space.
	noSpace
)

// step performs the term's request, unless it waits for etcd's events or an acknowledgement.
func (p *publisher) step(w *world, o outcome) {
	r := p.term.Request
	if o == fails && r.Op != WatchEtcd && r.Op != AwaitAck && r.Op != End {
		p.end(w, "a request failed")
		return
	}
	switch r.Op {
	case ReadLog:
		end := w.log.end()
		if w.trace != nil {
			w.tracef("%s: reads the log: %s", p.name, describeEnd(end))
		}
		p.term.LogRead(end)
	case ReadEtcd:
		s := EtcdState{Revision: w.etcd.revision()}
		s.Epoch, s.ModRevision = w.etcd.record()
		s.HasEvent = r.Event.Key != "" && w.etcd.hasEvent(r.Event)
		if w.trace != nil {
			w.tracef("%s: reads etcd at revision %d: epoch %s", p.name, s.Revision, describeEpoch(s.Epoch))
			if r.Event.Key != "" {
				w.tracef("%s: etcd has %s at revision %d: %v", p.name, r.Event.Key, r.Event.Revision, s.HasEvent)
			}
		}
		p.term.EtcdRead(s)
		sameEpoch := p.observed == s.Epoch.ID
		if !p.term.lost {
			sameEpoch = p.term.log.Progress.GetEpoch() == s.Epoch.ID
		}
		needless := !w.excused && sameEpoch && w.etcd.leader == p.name
		if p.term.Decision == "starts a new epoch" && needless {
			w.violated("%s starts an epoch without need: %s", p.name, p.term.Reason)
		}
		if w.trace != nil && p.term.Decision == "continues" {
			w.tracef("%s: the log continues", p.name)
		}
	case ReadObservedEnds:
		record, _ := w.etcd.record()
		p.observed = ""
		var ends []LogEnd
		for _, o := range w.publishers {
			for _, k := range o.reader.ends() {
				ends = append(ends, k.end)
				if !k.end.Empty && k.end.Progress.Epoch == record.ID {
					p.observed = record.ID
				}
				if w.trace != nil {
					w.tracef("%s: asks %s: its log %s", p.name, o.name, describeObserved(k.end))
				}
			}
		}
		p.term.ObservedEndsRead(record, ends)
	case DeleteLog:
		switch {
		case r.Last != w.log.end().Last:
			p.end(w, "the log has another end")
			return
		case o == noSpace: // no permission
			w.excuse()
			p.term.LogStays()
			p.watching(w)
			return
		}
		w.log = stream{created: w.log.created + 1}
		p.end(w, "it deletes the log, which has lost its end")
		return
	case WriteEpoch:
		p.writeEpoch(w, r, o)
	case ReadRevision, ReadOldest:
		revision := w.etcd.revision()
		if r.Op == ReadOldest {
			revision = w.etcd.compacted
		}
		if w.trace != nil {
			w.tracef("%s: reads etcd's %s revision: %d", p.name,
				map[bool]string{true: "oldest", false: "current"}[r.Op == ReadOldest], revision)
		}
		p.term.Answer(revision)
	case End:
		p.end(w, r.Reason.Error())
		return
	case AwaitAck, WatchEtcd:
		return
	}
	if p.term != nil {
		p.watching(w)
	}
}

// watching sends the term's messages, and begins the watch when the term waits for it.
func (p *publisher) watching(w *world) {
	p.send(w)
	if r := p.term.Request; r.Op == WatchEtcd && p.next == 0 {
		p.next = r.Revision
		if w.trace != nil {
			w.tracef("%s: watches etcd from revision %d", p.name, p.next)
		}
	}
	if p.term.Request.Op == End {
		p.end(w, p.term.Request.Reason.Error())
	}
}

func (p *publisher) writeEpoch(w *world, r Request, o outcome) {
	d := delayedWrite{p.name, r.Epoch, r.After}
	if o == noSpace {
		if !p.term.Unwritten() {
			p.end(w, "etcd has no space for a new epoch")
		} else if w.trace != nil {
			w.tracef("%s: etcd has no space for the epoch's record", p.name)
		}
		return
	}
	if o == delays {
		w.etcd.delayed = append(w.etcd.delayed, d)
		p.end(w, "the write of the epoch's record is delayed")
		return
	}
	if !w.writeEpoch(d) {
		p.end(w, ErrEpochChanged.Error())
		return
	}
	if w.trace != nil {
		w.tracef("%s: writes the epoch's record %s: revision %d", p.name, describeEpoch(r.Epoch), w.etcd.revision())
	}
	if o == loses {
		p.end(w, "the response to a write is lost")
		return
	}
	p.term.Answer(w.etcd.revision())
}

func describeObserved(end LogEnd) string {
	if end.Empty {
		return "is empty"
	}
	p := end.Progress
	s := fmt.Sprintf("ends at revision %d of %s, token %s", end.Last.Revision, p.Epoch, p.FencingToken)
	if end.Event.Key != "" {
		s += fmt.Sprintf(", with %s at revision %d", end.Event.Key, end.Event.Revision)
	}
	return s
}

func describeEnd(end LogEnd) string {
	if end.Empty {
		return "empty"
	}
	return fmt.Sprintf("ends with %v at sequence %d", end.Last, end.Sequence)
}

// waits returns whether the term waits for etcd's events.
func (p *publisher) waits() bool { return p.term != nil && p.term.Request.Op == WatchEtcd }

// receive receives the next revision of etcd, or a progress notification if there is none.
func (p *publisher) receive(w *world) {
	e := &w.etcd
	if p.next < e.compacted {
		if w.trace != nil {
			w.tracef("%s: etcd ends the watch: revision %d is compacted", p.name, p.next)
		}
		p.term.Compacted()
		p.watching(w)
		return
	}
	for p.next <= e.revision() && len(e.history[p.next].writes) == 0 {
		p.next++
	}
	if p.next > e.revision() {
		if w.trace != nil {
			w.tracef("%s: receives progress at revision %d", p.name, e.revision())
		}
		p.term.Progress(e.revision())
		p.watching(w)
		return
	}
	if w.trace != nil {
		w.tracef("%s: receives %s", p.name, e.describe(p.next))
	}
	var changes []Change
	for i, x := range e.history[p.next].writes {
		c := Change{EtcdEvent: EtcdEvent{keyOf(x), p.next, x.kind == logv1.Type_TYPE_DELETED},
			Resource: resourceNames[x.resource], Object: x.name,
			Previous: e.objects(x.resource, p.next-1)[x.name]}
		switch {
		case x.kind != logv1.Type_TYPE_ADDED && p.next == e.compacted:
			c.Err = ErrPrevCompacted
		case x.bad:
			c.Err = errBad
		default:
			c.Event = &logv1.Event{Type: x.kind, Revision: p.next, Index: int32(i), StorageResource: c.Resource,
				Name: x.name, ObservedUnixNano: int64(x.id)}
			if x.resource == definitions {
				c.CRDChanged = resourceNames[widgets]
			}
		}
		changes = append(changes, c)
	}
	p.next++
	p.term.Transaction(changes)
	p.watching(w)
}

// deliver moves the next message of a flight to the log, together with at most n-1 messages that join it.
func (f *flight) deliver(w *world, n int) {
	size := 1
	for size < min(n, len(f.messages)) && f.messages[size].Joins(&f.messages[size-1]) {
		size++
	}
	batch := f.messages[:size]
	f.messages = f.messages[size:]
	stored := w.log.store(batch...)
	if w.trace != nil {
		w.tracef("log: %s %s", map[bool]string{true: "stores", false: "rejects"}[stored], describeBatch(batch))
	}
	if stored {
		w.checkOrder(batch)
		f.acks = append(f.acks, batch[size-1].ID)
	} else {
		f.rejected = true
	}
}

func describeBatch(batch []LogEntry) string {
	s := batch[0].ID.String()
	for _, m := range batch[1:] {
		s += " with " + m.ID.String()
	}
	return s
}

// checkOrder checks that the events of the log's last message follow each other, and the events of their epoch before
// them.
func (w *world) checkOrder(batch []LogEntry) {
	for i, m := range batch[1:] {
		if !events.PositionOf(batch[i].Event).Before(events.PositionOf(m.Event)) {
			w.violated("the log has %v after %v", m.ID, batch[i].ID)
		}
	}
	e := batch[0].Event
	if e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "" {
		if record, _ := w.etcd.record(); record.ID == e.Epoch && e.Epoch != w.excusedIn {
			w.excused = false
		}
		return
	}
	for i := len(w.log.stored) - 2; i >= 0; i-- {
		before := w.log.stored[i]
		last := before.events[len(before.events)-1]
		switch {
		case before.id.Progress && last.Type == logv1.Type_TYPE_UNSPECIFIED:
			continue
		case before.id.Progress || last.Epoch != e.Epoch:
		case last.Revision > e.Revision || w.log.stored[len(w.log.stored)-1].id.Progress:
		case !events.PositionOf(last).Before(events.PositionOf(e)):
			w.violated("the log has %s after %v", describeEvent(e), before.id)
		}
		return
	}
}

// acknowledge delivers the newest acknowledgement to the publisher.
func (p *publisher) acknowledge(w *world) {
	f := p.flight
	if n := len(f.acks); n > 0 {
		id := f.acks[n-1]
		f.acks = f.acks[:0]
		if w.trace != nil {
			w.tracef("%s: %v is acknowledged", p.name, id)
		}
		p.term.Acknowledged(id)
		p.watching(w)
		return
	}
	if f.rejected {
		p.end(w, "a message was rejected")
	}
}
