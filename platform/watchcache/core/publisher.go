package core

import (
	"errors"
	"fmt"
	"slices"
	"time"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Epoch is the record of etcd's epoch, which the publisher stores in etcd. The JSON names are storage: replicas of two
// releases share them during a rolling upgrade.
//
// An etcd restored from a backup reuses revisions that the log holds with other contents. etcd does not record the
// restore, and new writes may pass the log's last revision before a publisher checks. The publisher therefore stores a
// fencing token in the record and rotates it. It writes the next token to the log before it writes it to etcd.
//
// If etcd's token matches neither of the log's, or etcd lacks the log's last event, etcd is in another epoch. The
// publisher then starts an epoch with a new ID, and nothing of the log is reused.
//
//	no record ── startEpoch, log filled from etcd's history ──▶ epoch
//	epoch ── Rotate ──▶ same epoch, next token
//	epoch ── next term, ContinuesEpoch: resume ──▶ same epoch, log continues
//	epoch ── next revision compacted: reset ──▶ same epoch, log reset after a later revision
//	epoch ── log lost, etcd matches an observed end: refill ──▶ same epoch, log filled from etcd's history
//	epoch ── log has lost its end, etcd matches an observed end: the log is deleted, and so is lost
//	epoch ── log lost, otherwise: startEpoch ──▶ another epoch, log begins at etcd's revision
//	epoch ── etcd restored, token or last event differ: startEpoch ──▶ another epoch, log begins at etcd's revision
type Epoch struct {
	ID    string `json:"id"`
	Token string `json:"mark"`
	// Since is the revision after which etcd's events belong to this epoch. Earlier events may differ from the events
	// that clients have seen. 0: unknown.
	Since int64 `json:"since,omitempty"`
}

// EtcdEvent identifies an event by the fields that etcd can confirm.
type EtcdEvent struct {
	Key      string
	Revision int64
	Deleted  bool
}

// LogEnd is the end of the log, as JetStream holds it or as a registry has read it.
type LogEnd struct {
	// Empty is true if the log has no message, or an observed end no fencing token. Last is then not set.
	Empty bool
	Last  ID
	// Sequence is the stream's last sequence.
	Sequence uint64
	// Progress is the last progress message or reset of all resources. Nil: the log's retention holds none.
	Progress *logv1.Event
	// Event is the last event of the log's history, without a key if the last messages hold none that can be checked.
	Event EtcdEvent
}

// ObservedEnd is the end of the log that a registry has read. If the log or its end is lost, a publisher compares etcd
// with the observed ends of all registries. The zero value is empty.
type ObservedEnd struct {
	epoch string
	end   LogEnd
	// replaced are the last fencing tokens before the token of end, at most replacedTokens. A log that has lost its end
	// repeats messages with these tokens.
	replaced []string
}

// replacedTokens bounds ObservedEnd.replaced. It is more than the tokens of a log, which has 10 minutes by default: a
// token is valid for 10 s. A reader may read the log from its beginning again.
const replacedTokens = 256

// Observe records the next event. key is the etcd key of its object; empty: unknown. A refilled log repeats events.
// These change no revision, and the fencing tokens only if they are not older.
func (o *ObservedEnd) Observe(e *logv1.Event, key string) {
	if e.Epoch == "" { // the reader has found a gap
		return
	}
	if e.Epoch != o.epoch {
		*o = ObservedEnd{epoch: e.Epoch}
	}
	if e.StorageResource == "" {
		o.observeToken(e)
	}
	if e.Revision < o.end.Last.Revision {
		return
	}
	o.end.Last = IDOf(e, "")
	if IsChange(e) && key != "" {
		o.end.Event = EtcdEvent{key, e.Revision, e.Type == logv1.Type_TYPE_DELETED}
	}
}

// observeToken records the fencing tokens of a progress message or a reset of all resources, unless they are older.
func (o *ObservedEnd) observeToken(e *logv1.Event) {
	switch p := o.end.Progress; {
	case slices.Contains(o.replaced, e.FencingToken),
		p != nil && e.FencingToken == p.FencingToken && e.NextFencingToken == "" && p.NextFencingToken != "":
		return
	case p != nil && e.FencingToken != p.FencingToken:
		o.replaced = append(o.replaced, p.FencingToken)
		o.replaced = o.replaced[max(0, len(o.replaced)-replacedTokens):]
	}
	o.end.Progress = e
}

// End returns the end.
func (o *ObservedEnd) End() LogEnd {
	end := o.end
	end.Empty = end.Progress == nil
	return end
}

// join returns the end that all readers of etcd's epoch have read together: the highest revision, and the last event. A
// progress message may rotate the fencing token without a later revision. The token of any reader at the highest
// revision therefore counts. If no reader is in etcd's epoch, join returns the end of another epoch.
func join(ends []LogEnd, record Epoch) LogEnd {
	all := LogEnd{Empty: true}
	for _, end := range ends {
		switch of := end.Progress.GetEpoch(); {
		case end.Empty, of != record.ID && !all.Empty:
			continue
		case all.Empty, all.Progress.Epoch != record.ID:
			all = end
			continue
		}
		if end.Event.Revision > all.Event.Revision {
			all.Event = end.Event
		}
		further := end.Last.Revision - all.Last.Revision
		if further > 0 || further == 0 && end.HasToken(record.Token) {
			all.Last, all.Progress = end.Last, end.Progress
		}
	}
	return all
}

// HasToken returns whether a fencing token is the log's last or next. The end must have a progress message.
func (l *LogEnd) HasToken(token string) bool {
	p := l.Progress
	return token == p.FencingToken || p.NextFencingToken != "" && token == p.NextFencingToken
}

// ReadBack reads an event, from the end of the log backwards, until Event is found. It returns false if it needs no
// earlier event. key is the etcd key of the event's object; empty: unknown. Events before a reset of all
// resources are of an earlier history, which etcd need not have.
func (l *LogEnd) ReadBack(e *logv1.Event, key string) (more bool) {
	if !IsChange(e) || key == "" {
		return e.Type != logv1.Type_TYPE_RESET || e.StorageResource != ""
	}
	l.Event = EtcdEvent{key, e.Revision, e.Type == logv1.Type_TYPE_DELETED}
	return false
}

// EtcdState is etcd's state when a term begins.
type EtcdState struct {
	// Epoch is the record, or the zero value if there is none or it cannot be decoded.
	Epoch Epoch
	// ModRevision is the mod revision of the record, 0 if there is none. Revision is etcd's.
	ModRevision, Revision int64
	// HasEvent is true if etcd has the event of the request, or has compacted its revision.
	HasEvent bool
}

// Publisher is a publisher's state between its terms. The zero value is ready to use.
type Publisher struct {
	// Published is the revision up to which the log is complete. 0: unknown.
	Published int64

	acknowledged int // counts the acknowledgements
	// failingSince is when the first term failed after acknowledgedThen acknowledgements. Zero: none has.
	failingSince     time.Time
	acknowledgedThen int
}

// Elected restarts the clock of TermFailed: the publisher leads from now on.
func (p *Publisher) Elected() { p.failingSince = time.Time{} }

// resignAfter is how long a leader may fail to publish before it resigns. Another replica may reach NATS and etcd.
const resignAfter = 8 * time.Second

// TermFailed records that a term ended with an error. It returns true if the leader must resign: no message was
// acknowledged for resignAfter.
func (p *Publisher) TermFailed(now time.Time) (resign bool) {
	if p.failingSince.IsZero() || p.acknowledged != p.acknowledgedThen {
		p.failingSince, p.acknowledgedThen = now, p.acknowledged
		return false
	}
	return now.Sub(p.failingSince) > resignAfter
}

// ErrEpochChanged ends a term whose epoch's record is not its own.
var ErrEpochChanged = errors.New("etcd is in another epoch than the log, or another publisher is elected")

// otherToken is the reason if the log and etcd have other fencing tokens: etcd was restored, or the log has lost its
// end.
const otherToken = "etcd's fencing token is not the log's last"

// ContinuesEpoch checks that etcd is a later state of the etcd that the log was written from. It returns the reason why
// it is not.
func ContinuesEpoch(log *LogEnd, etcd EtcdState) string {
	switch p := log.Progress; {
	case log.Last.Revision > etcd.Revision:
		return fmt.Sprintf("etcd is at revision %d, the log at %d", etcd.Revision, log.Last.Revision)
	case p == nil: // only the log's events are checked
	case p.Epoch != etcd.Epoch.ID:
		return fmt.Sprintf("etcd's epoch is %q, the log's %q", etcd.Epoch.ID, p.Epoch)
	case !log.HasToken(etcd.Epoch.Token):
		return otherToken
	}
	if log.Event.Key != "" && !etcd.HasEvent {
		return "etcd does not hold the log's last event"
	}
	return ""
}
