package core

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// world is a cluster in miniature: etcd, the log, publishers, replicas and a gateway. Its methods are the steps of
// transcripts and of random schedules. Each step is traced, if trace is set.
type world struct {
	etcd       etcd
	log        stream
	publishers []*publisher
	flights    []*flight
	replicas   []*replica
	gateway    gateway
	now        time.Time
	terms      int
	// excused: etcd was restored, or the log has lost messages, since the last epoch began. Another epoch may begin.
	// excusedIn is the epoch then.
	excused   bool
	excusedIn string
	trace     *strings.Builder
	// err is the first violation of an invariant.
	err error
}

func (w *world) tracef(format string, args ...any) { fmt.Fprintf(w.trace, format+"\n", args...) }

// violated records the violation of an invariant.
func (w *world) violated(format string, args ...any) {
	if w.err == nil {
		w.err = fmt.Errorf(format, args...)
		if w.trace != nil {
			w.tracef("VIOLATED: %v", w.err)
		}
	}
}

// The stored resources of a world. A change of a definition changes the CRD of widgets.
const (
	pods = iota
	configMaps
	widgets
	definitions
	resourceCount
)

var resourceNames = [resourceCount]string{"pods", "configmaps", "widgets.example.com",
	"customresourcedefinitions.apiextensions.k8s.io"}

// shortName returns a stored resource's name in transcripts.
func shortName(storageResource string) string {
	name, _, _ := strings.Cut(storageResource, ".")
	return strings.Replace(name, "customresourcedefinitions", "crds", 1)
}

func resourceOf(name string) int {
	for i, n := range resourceNames {
		if n == name || shortName(n) == name {
			return i
		}
	}
	return -1
}

// write is the change of an object in etcd. id identifies it in all histories of etcd.
type write struct {
	id       int
	resource int
	name     string
	kind     logv1.Type
	// bad objects cannot be decoded. An object whose name begins with "large" fits into no message.
	bad bool
}

// transaction is a revision of etcd: writes to served resources, or the epoch's record, or neither.
type etcdRevision struct {
	writes []write
	record *Epoch
}

// etcd is a history of revisions, which begins at 1.
type etcd struct {
	history   []etcdRevision // by revision
	compacted int64
	leader    string
	delayed   []delayedWrite
	// generation counts restores.
	generation int
	// timelines has the published writes of each resource, in order, for each generation.
	timelines []timeline
	writes    int
	// previous is the write of the same resource before a write, in its history. 0: none.
	previous []int
}

type timeline [resourceCount][]timelineEntry

type timelineEntry struct {
	revision int64
	id       int
}

// delayedWrite is a write of the epoch's record whose publisher no longer waits for it.
type delayedWrite struct {
	identity string
	epoch    Epoch
	after    int64
}

// newWorld returns a world with an empty etcd and no log.
func newWorld() *world {
	w := &world{now: time.Unix(0, 0), excused: true}
	w.etcd.history, w.etcd.compacted, w.etcd.previous = make([]etcdRevision, 2, 64), 1, make([]int, 1, 64)
	w.etcd.timelines = make([]timeline, 1, 4)
	w.gateway.epochs = map[string]int{}
	return w
}

func (e *etcd) revision() int64 { return int64(len(e.history)) - 1 }

// last returns the last write of a resource up to a revision, 0 if there is none.
func (t *timeline) last(resource int, revision int64) int {
	all := t[resource]
	for i := len(all) - 1; i >= 0; i-- {
		if all[i].revision <= revision {
			return all[i].id
		}
	}
	return 0
}

// record returns the epoch's record and its mod revision.
func (e *etcd) record() (Epoch, int64) { return e.recordAt(e.revision()) }

func (e *etcd) recordAt(revision int64) (Epoch, int64) {
	for r := revision; r > 0; r-- {
		if e.history[r].record != nil {
			return *e.history[r].record, r
		}
	}
	return Epoch{}, 0
}

// exists returns whether an object exists at a revision.
func (e *etcd) exists(resource int, name string) bool {
	for r := e.revision(); r > 0; r-- {
		for i := len(e.history[r].writes) - 1; i >= 0; i-- {
			if x := e.history[r].writes[i]; x.resource == resource && x.name == name {
				return x.kind != logv1.Type_TYPE_DELETED
			}
		}
	}
	return false
}

// commit adds a revision with writes. Each becomes ADDED, MODIFIED or DELETED.
func (w *world) commit(writes ...write) {
	e := &w.etcd
	e.history = append(e.history, etcdRevision{})
	t := &e.timelines[e.generation]
	for _, x := range writes {
		switch exists := e.exists(x.resource, x.name); {
		case x.kind == logv1.Type_TYPE_DELETED && !exists:
			continue
		case x.kind == logv1.Type_TYPE_DELETED:
		case exists:
			x.kind = logv1.Type_TYPE_MODIFIED
		default:
			x.kind = logv1.Type_TYPE_ADDED
		}
		e.writes++
		x.id = e.writes
		e.previous = append(e.previous, t.last(x.resource, e.revision()))
		t[x.resource] = append(t[x.resource], timelineEntry{e.revision(), x.id})
		last := &e.history[e.revision()]
		last.writes = append(last.writes, x)
	}
	if w.trace != nil {
		w.tracef("etcd: %s", e.describe(e.revision()))
	}
}

func (e *etcd) describe(revision int64) string {
	s := fmt.Sprintf("revision %d", revision)
	r := e.history[revision]
	for i, x := range r.writes {
		s += fmt.Sprintf("%s %s %s/%s", map[bool]string{true: ":", false: ","}[i == 0], kindName(x.kind),
			shortName(resourceNames[x.resource]), x.name)
	}
	if r.record != nil {
		s += ": the epoch's record " + describeEpoch(*r.record)
	}
	return s
}

func kindName(t logv1.Type) string {
	return [...]string{"progress", "ADDED", "MODIFIED", "DELETED", "RESET"}[t]
}

func describeEpoch(e Epoch) string {
	if e == (Epoch{}) {
		return "none"
	}
	s := fmt.Sprintf("%s, token %s", e.ID, e.Token)
	if e.Since > 0 {
		s += fmt.Sprintf(", since %d", e.Since)
	}
	return s
}

// compact compacts etcd up to a revision.
func (w *world) compact(revision int64) {
	w.etcd.compacted = max(w.etcd.compacted, min(revision, w.etcd.revision()))
	if w.trace != nil {
		w.tracef("etcd: compacted to revision %d", w.etcd.compacted)
	}
}

// restore restores etcd from a backup of a revision. Watches and requests to etcd end.
func (w *world) restore(revision int64) {
	e := &w.etcd
	e.history = e.history[:revision+1]
	e.compacted = min(e.compacted, revision)
	t := e.timelines[e.generation]
	for i := range t {
		n := len(t[i])
		for n > 0 && t[i][n-1].revision > revision {
			n--
		}
		t[i] = t[i][:n:n]
	}
	e.generation++
	e.timelines = append(e.timelines, t)
	e.delayed = nil
	if w.trace != nil {
		w.tracef("etcd: restored from a backup of revision %d", revision)
	}
	for _, p := range w.publishers {
		p.end(w, "etcd was restored")
	}
	w.flights = nil
	w.excuse()
}

// writeEpoch executes a write of the epoch's record, if its conditions hold.
func (w *world) writeEpoch(d delayedWrite) bool {
	e := &w.etcd
	_, modRevision := e.record()
	if e.leader != d.identity || modRevision != d.after {
		return false
	}
	e.history = append(e.history, etcdRevision{record: &d.epoch})
	if _, known := w.gateway.epochs[d.epoch.ID]; !known {
		w.gateway.epochs[d.epoch.ID] = e.generation
	}
	return true
}

// hasEvent returns whether etcd has an event, or has compacted its revision.
func (e *etcd) hasEvent(event EtcdEvent) bool {
	if event.Revision < e.compacted {
		return true
	}
	if event.Revision > e.revision() {
		return false
	}
	for _, x := range e.history[event.Revision].writes {
		if keyOf(x) == event.Key && (x.kind == logv1.Type_TYPE_DELETED) == event.Deleted {
			return true
		}
	}
	return false
}

func keyOf(x write) string { return resourceNames[x.resource] + "/" + x.name }

// stream is the log's stream in JetStream.
type stream struct {
	created int64
	before  uint64 // the sequence before the first message
	stored  []storedEvent
	lastID  string
}

type storedEvent struct {
	*logv1.StoredMessage
	event *logv1.Event
	id    ID
}

func (s *stream) last() uint64 { return s.before + uint64(len(s.stored)) }

// store stores a message, unless its expectation fails.
func (s *stream) store(m Message) bool {
	expected := ""
	if m.First {
		if m.ExpectedSequence != s.last() {
			return false
		}
	} else {
		if expected = m.Expected.String(); expected != s.lastID {
			return false
		}
	}
	s.lastID = m.ID.String()
	s.stored = append(s.stored, storedEvent{&logv1.StoredMessage{
		Sequence:          s.last() + 1,
		Id:                s.lastID,
		ExpectedLastMsgId: expected,
	}, m.Event, m.ID})
	return true
}

// excuse excuses the beginning of another epoch.
func (w *world) excuse() {
	record, _ := w.etcd.record()
	w.excused, w.excusedIn = true, record.ID
}

// expire removes the n oldest messages.
func (w *world) expire(n int) {
	w.excuse()
	s := &w.log
	s.stored = s.stored[n:]
	s.before += uint64(n)
	if w.trace != nil {
		w.tracef("log: the first %d messages expired", n)
	}
}

// loseEnd removes the n newest messages, as a server without a sync to disk does.
func (w *world) loseEnd(n int) {
	w.excuse()
	s := &w.log
	s.stored = s.stored[: len(s.stored)-n : len(s.stored)-n]
	if s.lastID = ""; len(s.stored) > 0 {
		s.lastID = s.stored[len(s.stored)-1].Id
	}
	if w.trace != nil {
		w.tracef("log: the last %d messages are lost", n)
	}
}

// recreate deletes the stream. The next term creates another.
func (w *world) recreate() {
	w.excuse()
	w.log = stream{created: w.log.created + 1}
	if w.trace != nil {
		w.tracef("log: the stream is lost")
	}
}

// end returns the end of the log as a term reads it.
func (s *stream) end() LogEnd {
	end := LogEnd{Empty: len(s.stored) == 0, Sequence: s.last()}
	more := true
	for i := len(s.stored) - 1; i >= 0; i-- {
		m := s.stored[i]
		if i == len(s.stored)-1 {
			end.Last = m.id
		}
		if m.id.Progress && end.Progress == nil {
			end.Progress = m.event
		}
		if more {
			more = end.ReadBack(m.event, m.event.StorageResource+"/"+m.event.Name)
		}
	}
	return end
}

func describeEvent(e *logv1.Event) string {
	s := kindName(e.Type)
	switch {
	case isEvent(e):
		s += " " + shortName(e.StorageResource) + "/" + e.Name
	case e.StorageResource != "":
		s += " of " + shortName(e.StorageResource)
	case e.Type == logv1.Type_TYPE_RESET:
		s += " of all"
	}
	if e.CrdChanged {
		s += ", CRD changed"
	}
	if e.More {
		s += ", more follow"
	}
	if e.FencingToken != "" {
		s += ", token " + e.FencingToken
	}
	if e.NextFencingToken != "" {
		s += ", next " + e.NextFencingToken
	}
	return s
}

// publisher is a candidate in the election, and its term.
type publisher struct {
	name   string
	core   Publisher
	term   *Term
	flight *flight
	// next is the next revision of the term's watch.
	next int64
	// number is the number of the term. tokens numbers its fencing tokens.
	number, tokens int
}

// flight is messages of a term on their way to the log, and acknowledgements on their way back.
type flight struct {
	owner    string
	messages []Message
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
	p := &publisher{name: name}
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
	if w.etcd.leader != "" {
		p.core.OtherLeader()
		if w.trace != nil {
			w.tracef("%s: %s leads, so the checkpoint is cleared", p.name, w.etcd.leader)
		}
	}
}

// crash kills the publisher's process.
func (p *publisher) crash(w *world) {
	p.end(w, "killed")
	p.core = Publisher{}
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
	for _, m := range p.term.TakeMessages() {
		if w.trace != nil {
			expects := "expects " + m.Expected.String()
			if m.First {
				expects = fmt.Sprintf("expects the sequence %d", m.ExpectedSequence)
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
		sameEpoch := p.term.log.Progress != nil && p.term.log.Progress.Epoch == s.Epoch.ID
		needless := !w.excused && sameEpoch && w.etcd.leader == p.name
		if p.term.Decision == "starts a new epoch" && needless {
			w.violated("%s starts an epoch without need: %s", p.name, p.term.Reason)
		}
		if w.trace != nil && p.term.Decision == "continues" {
			w.tracef("%s: the log continues", p.name)
		}
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
			Resource: resourceNames[x.resource]}
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

// deliver moves the next message of a flight to the log.
func (f *flight) deliver(w *world) {
	m := f.messages[0]
	f.messages = f.messages[1:]
	stored := w.log.store(m)
	if w.trace != nil {
		w.tracef("log: %s %v", map[bool]string{true: "stores", false: "rejects"}[stored], m.ID)
	}
	if stored {
		w.checkOrder(m.Event)
		f.acks = append(f.acks, m.ID)
	} else {
		f.rejected = true
	}
}

// checkOrder checks that the log's last message follows the events of its epoch before it.
func (w *world) checkOrder(e *logv1.Event) {
	if e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "" {
		if record, _ := w.etcd.record(); record.ID == e.Epoch && e.Epoch != w.excusedIn {
			w.excused = false
		}
		return
	}
	for i := len(w.log.stored) - 2; i >= 0; i-- {
		before := w.log.stored[i]
		switch {
		case before.id.Progress && before.event.Type == logv1.Type_TYPE_UNSPECIFIED:
			continue
		case before.id.Progress || before.event.Epoch != e.Epoch:
		case before.event.Revision > e.Revision || w.log.stored[len(w.log.stored)-1].id.Progress:
		case !events.PositionOf(before.event).Before(events.PositionOf(e)):
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
