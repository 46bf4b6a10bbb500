package core

import (
	"fmt"
	"slices"
	"strings"
	"time"

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
	// keepsEnds: a registry keeps the end of the log that it has read when its process is killed.
	keepsEnds bool
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

// etcdRevision is a revision of etcd: writes to served resources, or the epoch's record, or neither.
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

// objects returns the revisions of the objects of a resource, by name, as of a revision.
func (e *etcd) objects(resource int, revision int64) map[string]int64 {
	all := map[string]int64{}
	for r, h := range e.history[:revision+1] {
		for _, x := range h.writes {
			if x.resource == resource {
				all[x.name] = int64(r)
				if x.kind == logv1.Type_TYPE_DELETED {
					delete(all, x.name)
				}
			}
		}
	}
	return all
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
	stored  []storedEvents
	lastID  string
}

type storedEvents struct {
	*logv1.StoredMessage
	events []*logv1.Event
	id     ID
	// corrupt: no reader can read the events.
	corrupt bool
}

func (s *stream) last() uint64 { return s.before + uint64(len(s.stored)) }

// store stores messages as a message of the stream, unless the expectation of the first fails.
func (s *stream) store(batch ...LogEntry) bool {
	first, last, expected := batch[0], batch[len(batch)-1], ""
	if first.First {
		if first.Begin != s.last() {
			return false
		}
	} else {
		if expected = first.Expected.String(); expected != s.lastID {
			return false
		}
	}
	s.lastID = last.ID.String()
	stored := storedEvents{StoredMessage: &logv1.StoredMessage{
		Sequence:          s.last() + 1,
		Id:                s.lastID,
		ExpectedLastMsgId: expected,
	}, id: last.ID}
	for _, m := range batch {
		stored.events = append(stored.events, m.Event)
	}
	s.stored = append(s.stored, stored)
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

// loseEnd removes the n newest messages, as a server without a sync to disk does. Another epoch may begin, unless a
// registry has read the log's end.
func (w *world) loseEnd(n int) {
	s := &w.log
	w.excuseUnlessObserved(len(s.stored) - n)
	s.stored = s.stored[: len(s.stored)-n : len(s.stored)-n]
	if s.lastID = ""; len(s.stored) > 0 {
		s.lastID = s.stored[len(s.stored)-1].Id
	}
	if w.trace != nil {
		w.tracef("log: the last %d messages are lost", n)
	}
}

// corrupt makes a message unreadable.
func (w *world) corrupt(sequence uint64) {
	w.excuse()
	w.log.stored[sequence-w.log.before-1].corrupt = true
	if w.trace != nil {
		w.tracef("log: message %d is corrupt", sequence)
	}
}

// recreate deletes the stream. The next term creates another. Another epoch may begin, unless a registry has read the
// log's end.
func (w *world) recreate() {
	w.excuseUnlessObserved(0)
	w.log = stream{created: w.log.created + 1}
	if w.trace != nil {
		w.tracef("log: the stream is lost")
	}
}

// excuseUnlessObserved excuses the beginning of another epoch if the log keeps n messages, unless a registry has read
// the log's end, and a later revision than the messages have.
func (w *world) excuseUnlessObserved(n int) {
	kept := w.log
	kept.stored = kept.stored[:n]
	left := kept.end()
	if !slices.ContainsFunc(w.publishers, func(p *publisher) bool {
		return slices.ContainsFunc(p.reader.ends(), func(k keptEnd) bool {
			return k.at.at(&w.log) && !k.end.Empty && (left.Empty || k.end.Last.Revision > left.Last.Revision)
		})
	}) {
		w.excuse()
	}
}

// end returns the end of the log as a term reads it.
func (s *stream) end() LogEnd {
	end := LogEnd{Empty: len(s.stored) == 0 || s.stored[len(s.stored)-1].corrupt, Sequence: s.last()}
	if end.Empty {
		return end
	}
	more := true
	for i := len(s.stored) - 1; i >= 0; i-- {
		m := s.stored[i]
		if i == len(s.stored)-1 {
			end.Last = m.id
		}
		if m.id.Progress && end.Progress == nil {
			end.Progress = &logv1.Event{}
			if !m.corrupt {
				end.Progress = m.events[0]
			}
		}
		for i := len(m.events) - 1; i >= 0 && more && !m.corrupt; i-- {
			more = end.ReadBack(m.events[i], m.events[i].StorageResource+"/"+m.events[i].Name)
		}
	}
	return end
}

func describeEvent(e *logv1.Event) string {
	s := kindName(e.Type)
	switch {
	case IsChange(e):
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
