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

// HistoryKey is where etcd says which history it is of, outside of what kube-apiserver stores.
//
// An etcd that is restored from a backup counts revisions that the log has with another meaning, and nothing in etcd
// itself tells: writes may carry it past the log's end before any publisher looks. So the publisher keeps a mark here
// that it changes every markPeriod, and writes to the log what the mark is about to be before it changes it. Where the
// two differ, or the log's last event is not in etcd at its revision, this is another history: it gets an id of its
// own, and nothing is carried over.
const HistoryKey = "/watershed/history"

const (
	markPeriod = 10 * time.Second
	// markCheck is how often the leader looks whether the mark is still its own.
	markCheck = 2 * time.Second
)

// history is the value of HistoryKey.
type history struct {
	ID   string `json:"id"`
	Mark string `json:"mark"`
	// Since is the revision after which etcd's events are this history's: those before may be other than what clients
	// have seen. 0: nobody knows.
	Since int64 `json:"since,omitempty"`
}

var errHistory = errors.New("etcd has another history than the log, or somebody else publishes")

// readHistory is what etcd says; the zero value where it says nothing. written is since which revision it says so, and
// revision is etcd's.
func readHistory(ctx context.Context, client *clientv3.Client) (h history, written, revision int64, err error) {
	resp, err := client.Get(ctx, HistoryKey)
	if err != nil {
		return h, 0, 0, err
	}
	if len(resp.Kvs) > 0 {
		written = resp.Kvs[0].ModRevision
		if err := json.Unmarshal(resp.Kvs[0].Value, &h); err != nil {
			slog.Warn("What etcd says of its history cannot be read; it begins anew", "key", HistoryKey, "error", err)
			h = history{}
		}
	}
	return h, written, resp.Header.Revision, nil
}

// writeHistory writes h if this publisher is still elected and nobody has written since the revision after (0: ever);
// else errHistory. A transaction that is late can so change nothing.
func (p *Publisher) writeHistory(ctx context.Context, h history, after int64) (revision int64, err error) {
	data, err := json.Marshal(h)
	if err != nil {
		return 0, err
	}
	conditions := []clientv3.Cmp{clientv3.Compare(clientv3.Value(ElectionKey), "=", p.Identity),
		clientv3.Compare(clientv3.ModRevision(HistoryKey), "=", after)}
	resp, err := p.Storage.Client.Txn(ctx).If(conditions...).Then(clientv3.OpPut(HistoryKey, string(data))).Commit()
	if err != nil {
		return 0, err
	}
	if !resp.Succeeded {
		return 0, errHistory
	}
	return resp.Header.Revision, nil
}

// continues says whether etcd is at a later point of the history h, of which it has this revision, that the log was
// written from. A reason is why not.
func (p *Publisher) continues(ctx context.Context, last eventlog.ID, h history,
	revision int64) (reason string, err error) {
	if last.Revision > revision {
		return fmt.Sprintf("etcd is at revision %d, the log at %d", revision, last.Revision), nil
	}
	mark, err := p.lastMark(ctx)
	if err != nil {
		return "", err
	}
	switch {
	case mark == nil: // none within the log's retention: its events say the rest
	case mark.Epoch != h.ID:
		return fmt.Sprintf("etcd's history is %q, the log's %q", h.ID, mark.Epoch), nil
	case h.Mark != mark.FencingToken && (mark.NextFencingToken == "" || h.Mark != mark.NextFencingToken):
		return "etcd's mark is not the log's last", nil
	}
	same, err := p.holds(ctx)
	if err == nil && !same {
		reason = "etcd does not hold the log's last event"
	}
	return reason, err
}

// lastMark is the log's last progress or reset of everything; nil where there is none.
func (p *Publisher) lastMark(ctx context.Context) (*logv1.Event, error) {
	m, err := eventlog.GetLast(ctx, p.JS, eventlog.ProgressSubject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	return eventlog.Event(m.Header, m.Data)
}

// lastEvents is how far back the last event is looked for.
const lastEvents = 32

// holds says whether etcd has the log's last event at its revision.
func (p *Publisher) holds(ctx context.Context) (bool, error) {
	stream, err := p.JS.Stream(ctx, eventlog.StreamName)
	if err != nil {
		return false, err
	}
	state := stream.CachedInfo().State
	for n, seq := 0, state.LastSeq; n < lastEvents && seq >= state.FirstSeq && seq > 0; n, seq = n+1, seq-1 {
		m, err := eventlog.Get(ctx, p.JS, seq)
		if err != nil {
			return false, err
		}
		e, err := eventlog.Event(m.Header, m.Data)
		if err != nil || e.Type == logv1.Type_TYPE_UNSPECIFIED || e.Type == logv1.Type_TYPE_RESET {
			continue
		}
		if key, ok := p.keyOf(e); ok {
			return p.happened(ctx, happening{key, e.Revision, e.Type == logv1.Type_TYPE_DELETED})
		}
	}
	return true, nil
}

// happening is an event by what etcd can be asked of it.
type happening struct {
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

// happened says whether etcd has an event at its revision; true where nobody can say any more.
func (p *Publisher) happened(ctx context.Context, e happening) (bool, error) {
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

// memory is what a publisher knows, without the log, of the history that it published last: what it wrote to HistoryKey
// and at which revision, how far it came, and the last event. It has none once another has been elected.
type memory struct {
	history           history
	written, revision int64
	last              happening
}

// remembers says whether etcd, at this revision of the history h, which is written there since another, is at a later
// point of the history that this publisher published last. A reason is why not. The mark says that nobody has published
// since, and the last event that etcd was not set back.
func (p *Publisher) remembers(ctx context.Context, h history, written, revision int64) (reason string, err error) {
	m := p.memory
	switch {
	case h != m.history || written != m.written || h.Since == 0:
		return "the log was lost, and it was not this publisher that wrote the history last", nil
	case revision < m.revision:
		return fmt.Sprintf("etcd is at revision %d, and was at %d", revision, m.revision), nil
	case m.last.key == "":
		return "", nil
	}
	same, err := p.happened(ctx, m.last)
	if err == nil && !same {
		reason = "etcd does not hold the last event that was published"
	}
	return reason, err
}

// mark changes the mark: what it is about to be is in the log first, so that whoever finds either knows it. It is done
// between two transactions only, since it says that everything up to the log's last revision has been published.
func (p *Publisher) mark(ctx context.Context, w *term) error {
	if !w.log.Last().Progress && !w.whole {
		return nil
	}
	next := rand.Text()
	w.marker, w.nextMarker = w.history.Mark, next
	if err := w.append(&logv1.Event{Revision: w.log.Last().Revision}); err != nil {
		return err
	}
	if err := w.log.Flush(ctx); err != nil {
		return err
	}
	h := w.history
	h.Mark = next
	var err error
	if w.written, err = p.writeHistory(ctx, h, w.written); err != nil {
		return err
	}
	w.history, w.marker, w.nextMarker = h, next, ""
	p.memory.history, p.memory.written = h, w.written
	return w.append(&logv1.Event{Revision: w.log.Last().Revision})
}

// unmarked is errHistory once the mark is not what this publisher wrote, or etcd has gone back.
func (p *Publisher) unmarked(ctx context.Context, w *term) error {
	h, _, revision, err := readHistory(ctx, p.Storage.Client.Client)
	if err != nil {
		return err
	}
	if h != w.history || revision < w.log.Last().Revision {
		return errHistory
	}
	return nil
}
