package publisher

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// EpochKey is the etcd key that holds the epoch's record. It is outside of kube-apiserver's prefix.
//
// An etcd restored from a backup reuses revisions that the log holds with other contents. etcd does not record the
// restore, and new writes may pass the log's last revision before a publisher checks. The publisher therefore stores a
// fencing token in this key and rotates it every tokenPeriod. It writes the next token to the log before it writes it
// to etcd. If etcd's token matches neither of the log's, or etcd lacks the log's last event, etcd is in another epoch.
// The publisher then starts an epoch with a new ID, and nothing of the log is reused.
//
// The JSON names and the key are storage: replicas of two releases share them during a rolling upgrade.
//
//	no record ── startEpoch, log filled from etcd's history ──▶ epoch
//	epoch ── rotateToken, every tokenPeriod ──▶ same epoch, next token
//	epoch ── next term, continuesEpoch: resume ──▶ same epoch, log continues
//	epoch ── next revision compacted: reset ──▶ same epoch, log reset after a later revision
//	epoch ── log lost, matchesCheckpoint: refill ──▶ same epoch, log filled from etcd's history
//	epoch ── log lost, checkpoint differs: startEpoch ──▶ another epoch, log begins at etcd's revision
//	epoch ── etcd restored, token or last event differ: startEpoch ──▶ another epoch, log begins at etcd's revision
const EpochKey = "/watershed/history"

const (
	tokenPeriod = 10 * time.Second
	// tokenCheckPeriod is how often the leader checks that the token in etcd is its own.
	tokenCheckPeriod = 2 * time.Second
)

// epoch is the record at EpochKey.
type epoch struct {
	ID    string `json:"id"`
	Token string `json:"mark"`
	// Since is the revision after which etcd's events belong to this epoch. Earlier events may differ from the events
	// that clients have seen. 0: unknown.
	Since int64 `json:"since,omitempty"`
}

var errEpochChanged = errors.New("etcd is in another epoch than the log, or another publisher is elected")

// readEpoch returns the epoch in etcd, or the zero value if there is no record or it cannot be decoded. modRevision is
// the key's mod revision. revision is etcd's.
func readEpoch(ctx context.Context, client *clientv3.Client) (h epoch, modRevision, revision int64, err error) {
	resp, err := client.Get(ctx, EpochKey)
	if err != nil {
		return h, 0, 0, err
	}
	if len(resp.Kvs) > 0 {
		modRevision = resp.Kvs[0].ModRevision
		if err := json.Unmarshal(resp.Kvs[0].Value, &h); err != nil {
			slog.Warn("The epoch in etcd cannot be decoded; a new one starts", "key", EpochKey, "error", err)
			h = epoch{}
		}
	}
	return h, modRevision, resp.Header.Revision, nil
}

// writeEpoch writes h if this publisher is still elected and the mod revision of EpochKey is still after (0: the key
// does not exist). Otherwise it returns errEpochChanged. A delayed transaction of an earlier term therefore changes
// nothing.
func (p *Publisher) writeEpoch(ctx context.Context, h epoch, after int64) (revision int64, err error) {
	data, err := json.Marshal(h)
	if err != nil {
		return 0, err
	}
	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.Value(ElectionKey), "=", p.Identity),
		clientv3.Compare(clientv3.ModRevision(EpochKey), "=", after)}
	resp, err := p.Storage.Client.Txn(ctx).If(conditions...).Then(clientv3.OpPut(EpochKey, string(data))).Commit()
	if err != nil {
		return 0, err
	}
	if !resp.Succeeded {
		return 0, errEpochChanged
	}
	return resp.Header.Revision, nil
}

// continuesEpoch checks that etcd, at this revision and with the record h, is a later state of the etcd that the log
// was written from. reason says why it is not.
func (p *Publisher) continuesEpoch(ctx context.Context, last eventlog.ID, h epoch,
	revision int64) (reason string, err error) {
	if last.Revision > revision {
		return fmt.Sprintf("etcd is at revision %d, the log at %d", revision, last.Revision), nil
	}
	progress, err := p.lastProgress(ctx)
	if err != nil {
		return "", err
	}
	switch {
	case progress == nil: // the log's retention holds none: only its events are checked
	case progress.Epoch != h.ID:
		return fmt.Sprintf("etcd's epoch is %q, the log's %q", h.ID, progress.Epoch), nil
	case h.Token != progress.FencingToken && (progress.NextFencingToken == "" || h.Token != progress.NextFencingToken):
		return "etcd's fencing token is not the log's last", nil
	}
	same, err := p.hasLastEvent(ctx)
	if err == nil && !same {
		reason = "etcd does not hold the log's last event"
	}
	return reason, err
}

// lastProgress returns the log's last progress message or reset of all resources, or nil.
func (p *Publisher) lastProgress(ctx context.Context) (*logv1.Event, error) {
	m, err := eventlog.GetLast(ctx, p.JS, eventlog.ProgressSubject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return eventlog.Event(m.Header, m.Data)
}

// lastEventLookback is how many messages hasLastEvent reads back from the end of the log.
const lastEventLookback = 32

// hasLastEvent reports whether etcd has the log's last event at its revision. It is true if the last messages hold no
// event that can be checked.
func (p *Publisher) hasLastEvent(ctx context.Context) (bool, error) {
	stream, err := p.JS.Stream(ctx, eventlog.StreamName)
	if err != nil {
		return false, err
	}
	state := stream.CachedInfo().State
	for n, seq := 0, state.LastSeq; n < lastEventLookback && seq >= state.FirstSeq && seq > 0; n, seq = n+1, seq-1 {
		m, err := eventlog.Get(ctx, p.JS, seq)
		if err != nil {
			return false, err
		}
		e, err := eventlog.Event(m.Header, m.Data)
		if err != nil || e.Type == logv1.Type_TYPE_UNSPECIFIED || e.Type == logv1.Type_TYPE_RESET {
			continue
		}
		if key, ok := p.keyOf(e); ok {
			return p.hasEvent(ctx, etcdEvent{key, e.Revision, e.Type == logv1.Type_TYPE_DELETED})
		}
	}
	return true, nil
}

// etcdEvent identifies an event by the fields that etcd can confirm.
type etcdEvent struct {
	key      string
	revision int64
	deleted  bool
}

// keyOf returns the etcd key of an event's object. It is false for a custom resource, because its CRD as of the event's
// revision is unknown.
func (p *Publisher) keyOf(e *logv1.Event) (string, bool) {
	st, ok := p.Storage.ByName(e.StorageResource)
	if !ok {
		return "", false
	}
	return st.Key(e.Namespace, e.Name), true
}

// hasEvent reports whether etcd has an event at its revision. It is true if etcd has compacted the revision.
func (p *Publisher) hasEvent(ctx context.Context, e etcdEvent) (bool, error) {
	resp, err := p.Storage.Client.Client.Get(ctx, e.key, clientv3.WithRev(e.revision), clientv3.WithKeysOnly())
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		return true, nil
	case errors.Is(err, rpctypes.ErrFutureRev):
		return false, nil
	case err != nil:
		return false, err
	case e.deleted:
		return len(resp.Kvs) == 0, nil
	}
	return len(resp.Kvs) == 1 && resp.Kvs[0].ModRevision == e.revision, nil
}

// checkpoint is the state that a publisher last published, independent of the log. It holds the record at EpochKey with
// its mod revision, the last published revision, and the last event. It is cleared when another publisher is elected.
type checkpoint struct {
	epoch                      epoch
	epochModRevision, revision int64
	last                       etcdEvent
}

// matchesCheckpoint checks that etcd is a later state of the etcd that this publisher published last. etcd is at this
// revision and has the record h at modRevision. reason says why it is not. The record proves that no other publisher
// has published since. The last event proves that etcd was not restored.
func (p *Publisher) matchesCheckpoint(
	ctx context.Context,
	h epoch,
	modRevision, revision int64,
) (reason string, err error) {
	m := p.checkpoint
	switch {
	case h != m.epoch || modRevision != m.epochModRevision || h.Since == 0:
		return "the log was lost, and another publisher wrote the epoch last", nil
	case revision < m.revision:
		return fmt.Sprintf("etcd is at revision %d, and was at %d before", revision, m.revision), nil
	case m.last.key == "":
		return "", nil
	}
	same, err := p.hasEvent(ctx, m.last)
	if err == nil && !same {
		reason = "etcd does not hold the last published event"
	}
	return reason, err
}

// rotateToken replaces the fencing token. It writes the next token to the log before etcd, so that a publisher that
// finds either token recognizes the epoch. It runs only between two transactions, because its messages state that all
// events up to the log's last revision are published.
func (p *Publisher) rotateToken(ctx context.Context, w *term) error {
	if !w.log.Last().Progress && !w.transactionCompleted {
		return nil
	}
	next := rand.Text()
	w.token, w.nextToken = w.epoch.Token, next
	if err := w.append(&logv1.Event{Revision: w.log.Last().Revision}); err != nil {
		return err
	}
	if err := w.log.Flush(ctx); err != nil {
		return err
	}
	h := w.epoch
	h.Token = next
	var err error
	if w.epochModRevision, err = p.writeEpoch(ctx, h, w.epochModRevision); err != nil {
		return err
	}
	w.epoch, w.token, w.nextToken = h, next, ""
	p.checkpoint.epoch, p.checkpoint.epochModRevision = h, w.epochModRevision
	return w.append(&logv1.Event{Revision: w.log.Last().Revision})
}

// checkToken returns errEpochChanged if the token is not this publisher's, or if etcd's revision is before the log's.
func (p *Publisher) checkToken(ctx context.Context, w *term) error {
	h, _, revision, err := readEpoch(ctx, p.Storage.Client.Client)
	if err != nil {
		return err
	}
	if h != w.epoch || revision < w.log.Last().Revision {
		return errEpochChanged
	}
	return nil
}
