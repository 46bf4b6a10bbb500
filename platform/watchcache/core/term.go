package core

import (
	"errors"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Op is an operation that a term waits for.
type Op int

// The operations of a request. Each is answered by the method that its comment names.
const (
	// ReadLog reads the end of the log: LogRead.
	ReadLog Op = iota
	// ReadEtcd reads the epoch's record, and then whether etcd has Event: EtcdRead.
	ReadEtcd
	// ReadObservedEnds reads the epoch's record, and the ends of the log that the registries have read:
	// ObservedEndsRead.
	ReadObservedEnds
	// DeleteLog deletes the log, which has lost its end, and ends the term. The next term finds no log. If Last is no
	// longer the log's last message, another publisher continues the log, and DeleteLog only ends the term. LogStays,
	// if the log cannot be deleted.
	DeleteLog
	// WriteEpoch writes Epoch if the publisher is still elected and the record's mod revision is still After:
	// Answer. A delayed write of an earlier term therefore changes nothing. Unwritten, if etcd has no space.
	WriteEpoch
	// ReadRevision reads etcd's revision: Answer.
	ReadRevision
	// ReadOldest reads the oldest revision that etcd can still read, within the bound of a new log, and not after
	// Revision, which is etcd's revision if it is known: Answer. The bound does not apply to revisions after Reached.
	ReadOldest
	// AwaitAck waits until the log has stored all entries: Acknowledged.
	AwaitAck
	// WatchEtcd waits for etcd's events from Revision on: Transaction, Progress, ForceProgress, Compacted, Rotate and
	// Check.
	WatchEtcd
	// End ends the term for Reason.
	End
)

// Request is an operation with its operands.
type Request struct {
	Op       Op
	Event    EtcdEvent
	Epoch    Epoch
	After    int64
	Revision int64
	// Reached is a revision that readers have reached. A log that begins after it has a gap. 0: no reader has any.
	Reached int64
	// Last is the ID of a message.
	Last   ID
	Reason error
}

// Term is an attempt to publish. It begins at the end of the log and ends with the first error:
//
//	ReadLog ──▶ ReadEtcd ──▶ resume ─────────────────────▶ WatchEtcd ──▶ End
//	            │      ▲ ├─▶ refill ────── reset ────────▶    │           ▲
//	   log lost │      │ ├─▶ startEpoch ── reset ────────▶    │           │
//	or its end  ▼      │ └─▶ DeleteLog ───────────────────────┼───────────┤
//	     ReadObservedEnds                  etcd compacted ────┴── reset ──┘
//
// The term decides how to continue the log:
//
//	log has messages, etcd in the same epoch      resume: continue after the last message
//	log has messages but another token, and etcd
//	matches a later observed end                  DeleteLog: the log has lost its end, and becomes a lost log
//	log has messages, otherwise                   startEpoch: begin at etcd's revision
//	log lost, etcd matches an observed end        refill: begin with etcd's history
//	log lost, otherwise                           startEpoch: begin at etcd's revision
//	no log and no record, such as a cluster
//	that kube-apiserver served                    startEpoch: begin with etcd's history
//
// The caller performs the request of Request and answers it, until the term waits for etcd's events. An operation that
// fails ends the term: the caller drops it, and the next term reads the log again.
type Term struct {
	// Request is the operation that the term waits for. The entries of TakeEntries are appended before it.
	Request Request
	// Decision is the last decision about the log, and Reason its reason.
	Decision, Reason string

	publisher *Publisher
	chain     Chain
	entries   []LogEntry
	// then continues the term after the answer to its request.
	then func(revision int64)
	// log is the end of the log when the term began. lost: the log has no message, and log is the observed end.
	// shortened: the log may have lost its end, and log is the observed end if that is later.
	log             LogEnd
	lost, shortened bool
	// fresh is the record of a new epoch, if the term starts it.
	fresh Epoch
	// epoch is the record as this publisher read or wrote it. modRevision is its mod revision.
	epoch       Epoch
	modRevision int64
	// token and nextToken are the fencing tokens in the log's progress messages: the current token, and the next if a
	// rotation is under way.
	token, nextToken string
	// sums are of the term's transactions.
	sums sums
	// transactionCompleted: a whole transaction was published since the term began.
	transactionCompleted bool
	// forceProgress: the next progress is published even if the revision is unchanged.
	forceProgress bool
}

// Begin begins a term. nonce is unique among all terms. fresh has the random ID and token of a new epoch.
func (p *Publisher) Begin(nonce string, fresh Epoch, encode Encode) *Term {
	return &Term{publisher: p, chain: NewChain(nonce, ID{}, 0, encode), fresh: fresh, sums: newSums(nonce)}
}

// TakeEntries returns the entries to append to the log, in order. The slice is valid until the next call of a method.
func (t *Term) TakeEntries() []LogEntry {
	taken := t.entries
	t.entries = t.entries[:0]
	return taken
}

// LogRead answers ReadLog.
func (t *Term) LogRead(log LogEnd) {
	t.log, t.chain.Last, t.chain.begin = log, log.Last, log.Sequence
	t.Request = Request{Op: ReadEtcd, Event: log.Event}
	if t.lost = log.Empty; t.lost {
		t.Request = Request{Op: ReadObservedEnds}
	}
}

// ObservedEndsRead answers ReadObservedEnds.
func (t *Term) ObservedEndsRead(record Epoch, ends []LogEnd) {
	// Of a log with messages, only a later revision proves that it has lost its end. Otherwise etcd was restored, and
	// the tokens of registries may be older than the log's.
	if end := join(ends, record); !t.shortened || end.Last.Revision > t.log.Last.Revision {
		t.log = end
	}
	t.Request = Request{Op: ReadEtcd, Event: t.log.Event}
}

// EtcdRead answers ReadEtcd: the term decides how to continue the log.
func (t *Term) EtcdRead(etcd EtcdState) {
	t.epoch, t.modRevision, t.nextToken = etcd.Epoch, etcd.ModRevision, t.log.Progress.GetNextFencingToken()
	switch {
	case !t.log.Empty:
		t.Reason = ContinuesEpoch(&t.log, etcd)
		if t.Reason == otherToken && !t.lost && !t.shortened {
			t.shortened, t.Request = true, Request{Op: ReadObservedEnds}
			return
		}
		lostEnd := t.shortened && t.log.Last.Revision > t.chain.Last.Revision
		if lostEnd && t.Reason == "" {
			// A deposed publisher cannot write the record.
			t.writeEpoch(etcd.Epoch, func(int64) { t.await(Request{Op: DeleteLog, Last: t.chain.Last}, nil) })
			return
		}
		if t.lost && t.Reason != "" {
			t.Reason = "the log was lost, and " + t.Reason
		}
	case etcd.Epoch.ID == "":
		t.Reason = "etcd has no epoch"
	default:
		t.Reason = "the log was lost, and no registry has read the log of etcd's epoch"
	}
	switch same := t.Reason == "" && etcd.Epoch.ID != ""; {
	case same && !t.lost:
		t.resume(etcd)
	case same:
		t.refill(etcd)
	default:
		// clients may hold revisions of an earlier epoch
		t.startEpoch(!t.log.Empty || etcd.ModRevision != 0)
	}
}

// LogStays answers DeleteLog if the log cannot be deleted. The term starts an epoch.
func (t *Term) LogStays() {
	t.Reason = "the log has lost its end, and cannot be deleted"
	t.startEpoch(true)
}

// resume continues the log.
func (t *Term) resume(etcd EtcdState) {
	t.Decision = "continues"
	// Writing the record again invalidates the pending transactions of an earlier term.
	t.writeEpoch(etcd.Epoch, func(int64) { t.watch() })
}

// refill begins a new log of the same epoch with the history that etcd still has, because the old log was lost.
func (t *Term) refill(etcd EtcdState) {
	t.Decision, t.Reason = "is refilled from etcd", "the log was lost, and etcd is unchanged"
	t.writeEpoch(etcd.Epoch, func(revision int64) {
		r := Request{Op: ReadOldest, Revision: max(revision, etcd.Revision), Reached: t.log.Last.Revision}
		t.await(r, func(oldest int64) {
			t.restart(max(oldest, t.epoch.Since))
		})
	})
}

// startEpoch starts an epoch and its log. The log begins at etcd's current revision if clients may hold revisions of
// another epoch (otherEpoch). Otherwise it begins with the history that etcd still has.
func (t *Term) startEpoch(otherEpoch bool) {
	t.Decision = "starts a new epoch"
	e := t.fresh
	begin := func(since int64) {
		e.Since = since
		t.writeEpoch(e, func(int64) { t.restart(since) })
	}
	t.writeEpoch(e, func(revision int64) { // the write returns the revision that Since needs
		if otherEpoch {
			begin(revision)
			return
		}
		t.await(Request{Op: ReadOldest, Revision: revision}, begin)
	})
}

// restart begins the log with a reset: all events after a revision follow.
func (t *Term) restart(revision int64) {
	t.publisher.Published = 0
	t.chain.Restart()
	t.appendReset(revision, func(int64) { t.watch() })
}

// watch waits for etcd's events after the last message.
func (t *Term) watch() {
	from := t.chain.Last.Revision
	if t.chain.Last.Progress { // otherwise the log may lack the rest of its transaction
		from++
	}
	t.await(Request{Op: WatchEtcd, Revision: from}, nil)
}

func (t *Term) await(r Request, then func(revision int64)) {
	if t.Request.Op != End {
		t.Request, t.then = r, then
	}
}

func (t *Term) writeEpoch(e Epoch, then func(revision int64)) {
	t.await(Request{Op: WriteEpoch, Epoch: e, After: t.modRevision}, func(revision int64) {
		if revision != t.modRevision { // not Unwritten
			t.epoch, t.nextToken, t.modRevision = e, "", revision
		}
		t.token = t.epoch.Token
		then(revision)
	})
}

// Unwritten answers WriteEpoch if etcd has no space for the record. The term continues with the record that etcd has:
// etcd without space still deletes objects, and their events must reach the log. It returns false if the term cannot
// continue, because the record would begin an epoch.
//
// Pending writes of an earlier term stay valid. If etcd executes such a write, Check ends this term. The next term
// recognizes its token, which remains the log's next token.
func (t *Term) Unwritten() bool {
	e := t.Request.Epoch
	if e.ID != t.epoch.ID || e.Since != t.epoch.Since {
		return false
	}
	t.Answer(t.modRevision)
	return true
}

// Answer answers WriteEpoch with etcd's revision, and ReadRevision and ReadOldest.
func (t *Term) Answer(revision int64) { t.then(revision) }

// Acknowledged records that the log has stored an entry, and with it all earlier entries.
func (t *Term) Acknowledged(id ID) {
	p := t.publisher
	p.acknowledged++
	p.Published = max(p.Published, id.Revision)
	if t.Request.Op == AwaitAck && id == t.chain.Last {
		t.then(0)
	}
}

func (t *Term) end(reason error) { t.Request = Request{Op: End, Reason: reason} }

// stamp sets the epoch of an event, and the tokens if it is a progress message or a reset of all resources. A progress
// message also has the changed sums, and so has a reset that begins the term's log.
func (t *Term) stamp(e *logv1.Event) *logv1.Event {
	e.Epoch = t.epoch.ID
	if e.StorageResource == "" {
		e.FencingToken, e.NextFencingToken = t.token, t.nextToken
		if e.Type == logv1.Type_TYPE_UNSPECIFIED || !t.sums.begun {
			e.Sums = t.sums.take()
		}
	}
	return e
}

// append adds the message of an event. It returns an error if the event cannot be a message.
func (t *Term) append(e *logv1.Event) error {
	m, err := t.chain.Append(t.stamp(e))
	if err == nil {
		t.entries = append(t.entries, m)
	}
	return err
}

// Progress publishes that the log is complete up to revision: etcd has sent all events up to it.
func (t *Term) Progress(revision int64) {
	if revision > t.chain.Last.Revision || t.forceProgress {
		t.forceProgress = false
		t.appendControl(&logv1.Event{Revision: max(revision, t.chain.Last.Revision)})
	}
}

// ForceProgress makes the next Progress publish its revision even if the log has reached it.
func (t *Term) ForceProgress() { t.forceProgress = true }

// appendControl adds a progress message or a reset. Both fit into a message, so an error ends the term.
func (t *Term) appendControl(e *logv1.Event) {
	if err := t.append(e); err != nil {
		t.end(err)
	}
}

// Rotate replaces the fencing token. It writes the next token to the log before etcd, so that a publisher that finds
// either token recognizes the epoch. It acts only between two transactions, because its entries state that all events
// up to the log's last revision are published. The first entry has complete sums, for replicas that have started.
func (t *Term) Rotate(next string) {
	if !t.betweenTransactions() {
		return
	}
	t.nextToken, t.sums.due = next, true
	t.appendControl(&logv1.Event{Revision: t.chain.Last.Revision})
	watch := t.Request
	t.await(Request{Op: AwaitAck}, func(int64) {
		e := t.epoch
		e.Token = next
		t.writeEpoch(e, func(int64) {
			t.appendControl(&logv1.Event{Revision: t.chain.Last.Revision})
			t.await(watch, nil)
		})
	})
}

// betweenTransactions returns false if the log may end within a transaction.
func (t *Term) betweenTransactions() bool { return t.chain.Last.Progress || t.transactionCompleted }

// Check ends the term if the record is not this publisher's, or if etcd's revision is before the log's.
func (t *Term) Check(record Epoch, revision int64) {
	if record != t.epoch || revision < t.chain.Last.Revision {
		t.end(ErrEpochChanged)
	}
}

// Compacted resets the log, because etcd has compacted the next revision. etcd may still have later revisions.
func (t *Term) Compacted() {
	t.reset(Request{Op: ReadOldest}, "etcd compacted the log's next revision")
}

// errReset ends a term that has reset the log.
var errReset = errors.New("the log was reset")

// reset publishes a reset of all resources after the revision that the request reads, and ends the term.
func (t *Term) reset(r Request, reason string) {
	t.Decision, t.Reason = "is reset", reason
	t.await(r, func(revision int64) {
		t.appendReset(revision, func(int64) { t.end(errReset) })
	})
}

// appendReset publishes a reset of all resources after a revision, and calls then when the log has stored it.
func (t *Term) appendReset(revision int64, then func(int64)) {
	t.appendControl(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision})
	t.await(Request{Op: AwaitAck}, then)
}
