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

// EpochKey is where etcd says which history it is of, outside of what kube-apiserver stores.
//
// An etcd that is restored from a backup counts revisions that the log has with another meaning, and nothing in etcd
// itself tells: writes may carry it past the log's end before any publisher looks. So the publisher keeps a mark here
// that it changes every tokenPeriod, and writes to the log what the mark is about to be before it changes it. Where the
// two differ, or the log's last event is not in etcd at its revision, this is another history: it gets an id of its
// own, and nothing is carried over.
const EpochKey = "/watershed/history"

const (
	tokenPeriod = 10 * time.Second
	// tokenCheckPeriod is how often the leader looks whether the mark is still its own.
	tokenCheckPeriod = 2 * time.Second
)

// epoch is the value of EpochKey.
type epoch struct {
	ID    string `json:"id"`
	Token string `json:"mark"`
	// Since is the revision after which etcd's events are this history's: those before may be other than what clients
	// have seen. 0: nobody knows.
	Since int64 `json:"since,omitempty"`
}

var errEpochChanged = errors.New("etcd has another history than the log, or somebody else publishes")

// readEpoch is what etcd says; the zero value where it says nothing. written is since which revision it says so, and
// revision is etcd's.
func readEpoch(ctx context.Context, client *clientv3.Client) (h epoch, modRevision, revision int64, err error) {
	resp, err := client.Get(ctx, EpochKey)
	if err != nil {
		return h, 0, 0, err
	}
	if len(resp.Kvs) > 0 {
		modRevision = resp.Kvs[0].ModRevision
		if err := json.Unmarshal(resp.Kvs[0].Value, &h); err != nil {
			slog.Warn("What etcd says of its history cannot be read; it begins anew", "key", EpochKey, "error", err)
			h = epoch{}
		}
	}
	return h, modRevision, resp.Header.Revision, nil
}

// writeEpoch writes h if this publisher is still elected and nobody has written since the revision after (0: ever);
// else errEpochChanged. A transaction that is late can so change nothing.
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

// continuesEpoch says whether etcd is at a later point of the history h, of which it has this revision, that the log was
// written from. A reason is why not.
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
	case progress == nil: // none within the log's retention: its events say the rest
	case progress.Epoch != h.ID:
		return fmt.Sprintf("etcd's history is %q, the log's %q", h.ID, progress.Epoch), nil
	case h.Token != progress.FencingToken && (progress.NextFencingToken == "" || h.Token != progress.NextFencingToken):
		return "etcd's mark is not the log's last", nil
	}
	same, err := p.hasLastEvent(ctx)
	if err == nil && !same {
		reason = "etcd does not hold the log's last event"
	}
	return reason, err
}

// lastProgress is the log's last progress or reset of everything; nil where there is none.
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

// lastEventLookback is how far back the last event is looked for.
const lastEventLookback = 32

// hasLastEvent says whether etcd has the log's last event at its revision.
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

// etcdEvent is an event by what etcd can be asked of it.
type etcdEvent struct {
	key      string
	revision int64
	deleted  bool
}

// keyOf is where an event's object is in etcd; false for a custom resource's, whose definition would have to be known
// as it was.
func (p *Publisher) keyOf(e *logv1.Event) (string, bool) {
	st, ok := p.Storage.ByName(e.StorageResource)
	if !ok {
		return "", false
	}
	return st.Key(e.Namespace, e.Name), true
}

// hasEvent says whether etcd has an event at its revision; true where nobody can say any more.
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

// checkpoint is what a publisher knows, without the log, of the history that it published last: what it wrote to EpochKey
// and at which revision, how far it came, and the last event. It has none once another has been elected.
type checkpoint struct {
	epoch                      epoch
	epochModRevision, revision int64
	last                       etcdEvent
}

// matchesCheckpoint says whether etcd, at this revision of the history h, which is written there since another, is at a later
// point of the history that this publisher published last. A reason is why not. The mark says that nobody has published
// since, and the last event that etcd was not set back.
func (p *Publisher) matchesCheckpoint(
	ctx context.Context,
	h epoch,
	modRevision, revision int64,
) (reason string, err error) {
	m := p.checkpoint
	switch {
	case h != m.epoch || modRevision != m.epochModRevision || h.Since == 0:
		return "the log was lost, and it was not this publisher that wrote the history last", nil
	case revision < m.revision:
		return fmt.Sprintf("etcd is at revision %d, and was at %d", revision, m.revision), nil
	case m.last.key == "":
		return "", nil
	}
	same, err := p.hasEvent(ctx, m.last)
	if err == nil && !same {
		reason = "etcd does not hold the last event that was published"
	}
	return reason, err
}

// rotateToken changes the mark: what it is about to be is in the log first, so that whoever finds either knows it. It is done
// between two transactions only, since it says that everything up to the log's last revision has been published.
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

// checkToken is errEpochChanged once the mark is not what this publisher wrote, or etcd has gone back.
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
