package core

import (
	"fmt"
	"math"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// replica is a replica of the watch tier.
type replica struct {
	name   string
	reader Reader
	core   Replica
	rings  [resourceCount]ring
	// crdChangedAt is the revision of the last change of each resource's CRD.
	crdChangedAt [resourceCount]int64
	// objects has the revisions of each loaded resource's objects, by name. checkers has their sums. events has the
	// sums of each ring's events since its last reset.
	objects  [resourceCount]map[string]int64
	checkers [resourceCount]SumChecker
	events   [resourceCount]SumChecker
	sums     TermSums
	// limit is how many events a ring holds.
	limit int
	// starts counts the starts of the process.
	starts int
	// observed is the end that the replica has read. It counts if the replica is the reader of a registry.
	observed ObservedEnd
	// kept is the end in the file of a registry that has restarted. Once the registry has read the log of etcd's epoch
	// to its end, it keeps that end instead (replaced).
	kept     *keptEnd
	replaced bool
}

// keptEnd is the end of the log in a registry's file, and the reader's position at it.
type keptEnd struct {
	end LogEnd
	at  Reader
}

// ends returns the ends that a registry has read and kept, with its positions at them.
func (r *replica) ends() []keptEnd {
	all := []keptEnd{{r.observed.End(), r.reader}}
	if r.kept != nil && !r.replaced {
		all = append(all, *r.kept)
	}
	return all
}

// checkEpoch makes a registry replace its file, once it has read the log of etcd's epoch to its end.
func (r *replica) checkEpoch(w *world) {
	end := r.observed.End()
	if !w.keepsEnds || end.Empty || !r.reader.at(&w.log) {
		return
	}
	record, _ := w.etcd.record()
	s := EtcdState{Epoch: record, Revision: w.etcd.revision(), HasEvent: w.etcd.hasEvent(end.Event)}
	r.replaced = r.replaced || ContinuesEpoch(&end, s) == ""
}

// at returns whether a position is the end of the stream.
func (r *Reader) at(s *stream) bool {
	return r.created == s.created && r.Sequence == s.last() && r.id == s.lastID
}

// ring is the recent events of a resource.
type ring struct {
	Events[cached]
	Horizon
}

// cached is an event in a ring.
type cached struct {
	position events.Position
	id       int
}

func (c cached) At() events.Position { return c.position }

func (w *world) replica(name string) *replica {
	for _, r := range w.replicas {
		if r.name == name {
			return r
		}
	}
	r := &replica{name: name, limit: 8}
	w.replicas = append(w.replicas, r)
	return r
}

// restart kills the replica's process and starts another. Its streams break.
func (r *replica) restart(w *world) {
	*r = replica{name: r.name, limit: r.limit, starts: r.starts + 1}
	if w.trace != nil {
		w.tracef("%s: is killed, and starts again", r.name)
	}
}

// live receives a message that NATS republishes. It returns ErrMissed if the replica must read the stream.
func (r *replica) live(w *world, sequence uint64) error {
	s := &w.log
	if sequence <= s.before || sequence > s.last() {
		return nil
	}
	next, err := r.reader.Live(sequence)
	if err == nil && next {
		err = r.next(w, s.stored[sequence-s.before-1], true)
	}
	if err != nil && w.trace != nil {
		w.tracef("%s: receives message %d, and has missed messages", r.name, sequence)
	}
	return err
}

// catchUp reads the rest of the stream.
func (r *replica) catchUp(w *world) {
	s := &w.log
	for {
		request := r.reader.Request()
		if r.reader.Reposition(&logv1.Chunk{Created: s.created, Last: s.last()}) {
			if w.trace != nil {
				w.tracef("%s: the stream does not continue at message %d", r.name, request.Sequence)
			}
			continue
		}
		for sequence := max(request.Sequence, s.before+1); sequence <= s.last(); sequence++ {
			if err := r.next(w, s.stored[sequence-s.before-1], false); err != nil {
				w.violated("%s cannot read message %d: %v", r.name, sequence, err)
			}
		}
		return
	}
}

func (r *replica) next(w *world, m storedEvents, live bool) error {
	if m.corrupt {
		m.events = nil
	}
	gap, all, err := r.reader.Next(m.StoredMessage, m.events, live)
	if err != nil {
		return err
	}
	if gap != nil {
		r.apply(w, gap, "the log has a gap")
	}
	for _, e := range all {
		r.apply(w, e, "")
	}
	return nil
}

// apply applies a message's effects.
func (r *replica) apply(w *world, e *logv1.Event, note string) {
	r.observed.Observe(e, e.StorageResource+"/"+e.Name)
	effects := r.core.Apply(e)
	if w.trace != nil {
		if note == "" {
			note = IDOf(e, "").String()
			note = note[:len(note)-1]
		}
		w.tracef("%s: reads %s: %s", r.name, note, describeEvent(e))
	}
	for _, x := range effects {
		if w.trace != nil {
			w.tracef("%s:   %s", r.name, describeEffect(x))
		}
		if x.Resource == "" {
			r.sums = TermSums{}
		}
		for i := range r.rings {
			if x.Resource != "" && x.Resource != resourceNames[i] {
				continue
			}
			ring := &r.rings[i]
			if x.Events == nil {
				ring.Events.Reset()
				ring.Horizon.Reset(x.Low)
				r.objects[i], r.checkers[i], r.events[i] = nil, SumChecker{}, SumChecker{}
				if x.CRDChanged {
					r.crdChangedAt[i] = x.CRDChangedAt
				}
				continue
			}
			for _, p := range x.Events {
				ring.Add(cached{events.PositionOf(p), int(p.ObservedUnixNano)})
				r.events[i].Sum += ObjectHash(p.Name, p.Revision)
				r.update(i, p.Name, p.Revision, p.Type == logv1.Type_TYPE_DELETED)
			}
			for ring.Len() > 1 {
				oldest := ring.Oldest().position
				if !ring.MustDrop(oldest.Revision, int64(ring.Len()), Bound{Bytes: int64(r.limit)}) {
					break
				}
				ring.Low = oldest
				ring.Events.Drop(1)
				if w.trace != nil {
					w.tracef("%s:   drops the event at %s", r.name, describePosition(oldest))
				}
			}
		}
	}
	if w.trace != nil {
		w.tracef("%s:   has applied revision %d", r.name, r.core.Progress)
	}
	if e.Sums != nil {
		r.compare(w, e)
	}
}

// compare compares the sums of the loaded resources, and of the events, with the publisher's.
func (r *replica) compare(w *world, e *logv1.Event) {
	sums := r.core.SumsAt(e)
	r.sums.Receive(sums, e.Revision)
	for i, name := range resourceNames {
		change, listed := sums.GetChanges()[name]
		if !listed && !sums.GetComplete() {
			continue
		}
		if r.objects[i] != nil && r.checkers[i].Differs(sums.Term, change) {
			w.violated("%s: the objects of %s differ from the publisher's sums", r.name, shortName(name))
		}
		if r.events[i].Differs(sums.Term, sums.Events[name]) {
			w.violated("%s: the events of %s differ from the publisher's sums", r.name, shortName(name))
		}
	}
}

// load reads the objects of a resource from etcd, at the replica's revision.
func (r *replica) load(w *world, resource int) {
	at := r.core.Progress
	if at == 0 || at > w.etcd.revision() || r.core.partial.Revision > at { // the ring would hold the partial events
		return
	}
	r.objects[resource], r.checkers[resource] = map[string]int64{}, SumChecker{}
	for name, revision := range w.etcd.objects(resource, at) {
		r.update(resource, name, revision, false)
	}
	newest := r.rings[resource].Low.Revision
	if held := r.rings[resource].All(); len(held) > 0 {
		newest = held[len(held)-1].position.Revision
	}
	if term, change, ok := r.sums.Change(resourceNames[resource], newest); ok {
		r.checkers[resource].Differs(term, change)
	}
}

// update updates an object of a loaded resource.
func (r *replica) update(resource int, name string, revision int64, deleted bool) {
	objects, sum := r.objects[resource], &r.checkers[resource].Sum
	if objects == nil {
		return
	}
	if before, found := objects[name]; found {
		*sum -= ObjectHash(name, before)
		delete(objects, name)
	}
	if !deleted {
		*sum += ObjectHash(name, revision)
		objects[name] = revision
	}
}

func describeEffect(x Effect) string {
	name := "all resources"
	if x.Resource != "" {
		name = shortName(x.Resource)
	}
	if x.Events == nil {
		return fmt.Sprintf("resets %s: events up to revision %d may be missing", name, x.Low)
	}
	s := "applies to " + name + ":"
	for _, e := range x.Events {
		s += fmt.Sprintf(" %s %s (%d.%d)", kindName(e.Type), e.Name, e.Revision, e.Index)
	}
	return s
}

func describePosition(p events.Position) string {
	s := fmt.Sprintf("%d.%d", p.Revision, p.Index)
	if p.Index == events.LastIndex {
		s = fmt.Sprintf("%d", p.Revision)
	}
	if p.Epoch != "" {
		s += " of " + p.Epoch
	}
	return s
}

// tierStream is a watch stream of a replica: a cursor into a resource's ring.
type tierStream struct {
	replica  *replica
	starts   int // of the replica when the stream began
	resource int
	position events.Position
	cursor   int64
	// bookmarkDue: a bookmark follows when all events are sent.
	bookmarkDue bool
	frames      []*watchfanoutv1.WatchFrame
	ended       bool
}

// watch opens a stream at a replica that resumes after a position.
func (r *replica) watch(w *world, resource int, after events.Position) *tierStream {
	s := &tierStream{replica: r, starts: r.starts, resource: resource, position: after}
	if w.trace != nil {
		w.tracef("%s: %s watches after %s", r.name, shortName(resourceNames[resource]), describePosition(after))
	}
	if s.resume(w) && after.Revision <= r.core.Progress {
		s.send(w, nil, nil)
	}
	return s
}

// broken returns whether the stream's replica was killed.
func (s *tierStream) broken() bool { return s.starts != s.replica.starts }

// resume moves the cursor after the stream's position, and replays events that the ring has dropped. It returns false
// if the watch has expired.
func (s *tierStream) resume(w *world) bool {
	r := s.replica
	if s.position.Epoch == "" {
		s.position.Epoch = r.core.Epoch
		if s.position.Revision > r.core.Progress && s.position.Revision > w.etcd.revision() {
			return s.expire(w, "etcd has not reached the revision")
		}
	}
	ring := &r.rings[s.resource]
	if s.position.DifferentEpoch(events.Position{Epoch: r.core.Epoch}) {
		return s.expire(w, "the epoch changed")
	}
	if !ring.Holds(s.position) && !s.replay(w) {
		return s.expire(w, "events after the position are gone")
	}
	s.cursor = ring.After(s.position)
	return true
}

// replay sends the events that the ring has dropped from the log.
func (s *tierStream) replay(w *world) bool {
	log := &w.log
	after := s.position.Revision
	if s.position.Index != events.LastIndex {
		after--
	}
	start := len(log.stored)
	for start > 0 && log.revisionBefore(start-1) > after {
		start--
	}
	if start == 0 {
		return false
	}
	replay, upTo := NewReplay(after, s.position.Epoch), after
	var batch []cached
	for _, e := range log.eventsOf(start-1, resourceNames[s.resource]) {
		part, err := replay.Next(e)
		if err != nil {
			break
		}
		if !part {
			continue
		}
		if n := len(batch); n > 0 && e.Revision > batch[n-1].position.Revision {
			upTo = batch[n-1].position.Revision
		}
		if !IsChange(e) {
			upTo = e.Revision
			continue
		}
		batch = append(batch, cached{events.PositionOf(e), int(e.ObservedUnixNano)})
	}
	for n := len(batch); n > 0 && batch[n-1].position.Revision > upTo; n-- {
		batch = batch[:n-1]
	}
	if upTo <= after {
		return false
	}
	if w.trace != nil {
		w.tracef("%s: replays the log after revision %d up to %d", s.replica.name, after, upTo)
	}
	s.send(w, batch, nil)
	if p := (events.Position{Revision: upTo, Index: events.LastIndex, Epoch: s.position.Epoch}); s.position.Before(p) {
		s.position = p
	}
	return s.replica.rings[s.resource].Holds(s.position)
}

// eventsOf returns the events of a resource, progress and resets, from a message on.
func (s *stream) eventsOf(from int, storageResource string) (all []*logv1.Event) {
	for _, m := range s.stored[from:] {
		if r := m.events[0].StorageResource; r == "" || r == storageResource {
			if m.corrupt { // the replay ends
				return append(all, &logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: math.MaxInt64})
			}
			all = append(all, m.events...)
		}
	}
	return all
}

// revisionBefore returns the revision up to which the log is complete before a message.
func (s *stream) revisionBefore(i int) int64 {
	m := s.stored[i]
	name := m.ExpectedLastMsgId
	if name == "" {
		name = m.Id
	}
	id, err := ParseID(name)
	switch {
	case err != nil:
		panic(err)
	case !id.Progress && id.Index == 0 && name == m.Id:
		return id.Revision - 1
	}
	return id.Revision
}

func (s *tierStream) expire(w *world, reason string) bool {
	if w.trace != nil {
		w.tracef("%s: sends 410 Expired: %s", s.replica.name, reason)
	}
	s.ended = true
	s.frames = append(s.frames, &watchfanoutv1.WatchFrame{End: true})
	return false
}

// pump sends at most n events, and then a bookmark if it is due.
func (s *tierStream) pump(w *world, n int) {
	if s.ended || s.broken() {
		return
	}
	r := s.replica
	batch, more, ok := r.rings[s.resource].Read(s.cursor, n)
	for !ok {
		if !s.resume(w) {
			return
		}
		batch, more, ok = r.rings[s.resource].Read(s.cursor, n)
	}
	s.cursor += int64(len(batch))
	if len(batch) > 0 {
		s.send(w, batch, nil)
	}
	if progress := r.core.Progress; s.bookmarkDue && !more && progress >= s.position.Revision {
		s.bookmarkDue = false
		s.send(w, nil, &events.Position{Revision: progress, Index: events.LastIndex, Epoch: r.core.Epoch})
	}
}

// send sends a frame of the events that the client does not have, and a bookmark.
func (s *tierStream) send(w *world, batch []cached, bookmark *events.Position) {
	m := &watchfanoutv1.WatchFrame{}
	add := func(p events.Position, id int, bookmark bool) {
		m.Data = append(m.Data, byte(id), byte(id>>8), byte(id>>16), map[bool]byte{true: 1}[bookmark])
		p.Epoch = s.position.Epoch
		s.position = p
		m.Boundaries = append(m.Boundaries, &watchfanoutv1.EventBoundary{End: int32(len(m.Data)),
			Position: s.position.Proto(), Bookmark: bookmark})
	}
	for _, e := range batch {
		if s.position.Before(e.position) {
			add(e.position, e.id, false)
		}
	}
	if bookmark != nil {
		w.gateway.bookmarks = append(w.gateway.bookmarks, *bookmark)
		add(*bookmark, len(w.gateway.bookmarks)-1, true)
	}
	m.Position = s.position.Proto()
	s.frames = append(s.frames, m)
	if w.trace != nil {
		w.tracef("%s: sends %s", s.replica.name, w.describeFrame(m))
	}
}

func (w *world) describeFrame(m *watchfanoutv1.WatchFrame) string {
	s := ""
	offset := int32(0)
	for _, b := range m.Boundaries {
		s += w.describePart(m.Data[offset:b.End]) + ", "
		offset = b.End
	}
	return s + "position " + describePosition(events.FromProto(m.Position))
}

// describePart describes an event or a bookmark.
func (w *world) describePart(part []byte) string {
	id := idOf(part)
	if isBookmark(part) {
		return fmt.Sprintf("BOOKMARK %d", w.gateway.bookmarks[id].Revision)
	}
	for r := w.etcd.revision(); r > 0; r-- {
		for _, x := range w.etcd.history[r].writes {
			if x.id == id {
				return kindName(x.kind) + " " + x.name
			}
		}
	}
	return fmt.Sprintf("event %d", id)
}

func idOf(part []byte) int        { return int(part[0]) | int(part[1])<<8 | int(part[2])<<16 }
func isBookmark(part []byte) bool { return part[3] == 1 }
