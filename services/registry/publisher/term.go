package publisher

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// EpochKey returns the etcd key that holds the epoch's record (core.Epoch). It is storage: replicas of two releases
// share it during a rolling upgrade.
func (p *Publisher) EpochKey() string {
	return p.Etcd.OwnKey(KeyPrefix(p.Log.Name, p.Log.ID) + "epoch")
}

const (
	// tokenPeriod is how often the leader rotates the fencing token of the epoch.
	tokenPeriod = 10 * time.Second
	// tokenCheckPeriod is how often the leader checks that the token in etcd is its own.
	tokenCheckPeriod = 2 * time.Second
	// requestTimeout bounds the requests of a term to etcd and NATS before it waits for etcd's events.
	requestTimeout = 10 * time.Second
)

// errLogDeleted ends a term that has deleted the log. The next term fills another.
var errLogDeleted = errors.New("the event log is deleted, and is filled again")

// term performs the requests of a core.Term. A single goroutine uses it.
type term struct {
	*core.Term
	*Publisher
	log *eventlog.Writer
}

// proceed adds the term's entries to the log and performs its requests, until the term waits for etcd's events. It
// returns the error that ends the term.
func (t *term) proceed(ctx context.Context) error {
	if err := t.add(ctx); err != nil {
		return err
	}
	if t.Request.Op == core.WatchEtcd {
		return t.log.FlushLater(ctx)
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	if err := t.log.Flush(ctx); err != nil {
		return err
	}
	for t.Request.Op != core.WatchEtcd {
		if err := t.perform(ctx, t.Request); err != nil {
			return err
		}
		if err := t.add(ctx); err != nil { // progress and resets, which do not wait
			return err
		}
	}
	return nil
}

// add adds the term's entries to the log.
func (t *term) add(ctx context.Context) error {
	entries := t.TakeEntries()
	for _, entry := range entries {
		switch e := entry.Event; {
		case core.IsChange(e):
			publishedEvents.WithLabelValues(e.StorageResource).Inc()
		case e.Type == logv1.Type_TYPE_RESET && e.StorageResource == "":
			resetCount.Inc()
			slog.Warn("The event log "+t.Decision, "reason", t.Reason, "after", e.Revision, "last", entry.Expected.String())
		}
	}
	t.published.Store(t.core.Published)
	return t.log.Add(ctx, entries...)
}

// perform performs a request and answers it.
func (t *term) perform(ctx context.Context, r core.Request) (err error) {
	var revision int64
	switch r.Op {
	case core.ReadLog:
		var end core.LogEnd
		end, err = t.Publisher.Log.End(ctx, t.JS, t.keyOf)
		if errors.Is(err, eventlog.ErrOtherStorage) {
			return t.moveLog(ctx)
		}
		if err == nil {
			if !end.Empty {
				t.logEpoch = end.Progress.GetEpoch()
			}
			t.LogRead(end)
		}
		return err
	case core.ReadEtcd:
		var etcd core.EtcdState
		if etcd, err = t.readEtcd(ctx, r.Event); err == nil {
			t.EtcdRead(etcd)
		}
		return err
	case core.ReadObservedEnds:
		var etcd core.EtcdState
		if etcd, err = t.readEpoch(ctx); err != nil {
			return err
		}
		var ends []core.LogEnd
		if ends, err = t.observedEnds(ctx, etcd.Epoch); err == nil {
			t.ObservedEndsRead(etcd.Epoch, ends)
		}
		return err
	case core.DeleteLog:
		return t.deleteLog(ctx, r.Last)
	case core.AwaitAck:
		select {
		case ack := <-t.log.Acks():
			return t.acknowledge(ack)
		case <-ctx.Done():
			return ctx.Err()
		}
	case core.End:
		return r.Reason
	case core.WriteEpoch:
		revision, err = t.writeEpoch(ctx, r.Epoch, r.After)
		if errors.Is(err, rpctypes.ErrNoSpace) && t.Unwritten() {
			slog.Warn("etcd has no space for the next fencing token; the log continues with the token in etcd")
			return nil
		}
	default:
		revision, err = t.readRevision(ctx, r)
	}
	if err == nil {
		t.Answer(revision)
	}
	return err
}

// deleteLog deletes the stream, which has lost its end, if its last message is still the same. It returns the error
// that ends the term.
func (t *term) deleteLog(ctx context.Context, last core.ID) error {
	log := t.Publisher.Log
	if id, _, _, err := log.ID.Last(ctx, t.JS); err != nil {
		return err
	} else if id != last {
		return core.ErrEpochChanged
	}
	switch deleted, err := log.Delete(ctx, t.JS); {
	case deleted:
		slog.Error("The stream of the event log is deleted: it has lost its end", "stream", log.ID.Stream())
		return errLogDeleted
	case errors.Is(err, eventlog.ErrNotDeleted):
		slog.Warn("The stream of the event log has lost its end, and cannot be deleted", "stream", log.ID.Stream(),
			"error", err)
		t.LogStays()
		return nil
	case err != nil:
		return err
	}
	return errNoLeader
}

// moveLog deletes the stream, because its storage is not --log-storage, if this publisher is still elected. It returns
// the error that ends the term.
func (t *term) moveLog(ctx context.Context) error {
	holder, err := t.Etcd.Client.Client.Get(ctx, t.electionKey())
	if err != nil {
		return err
	}
	// No candidate holds the key while the publisher leads without a lease.
	if len(holder.Kvs) > 0 && string(holder.Kvs[0].Value) != t.Identity {
		return core.ErrEpochChanged
	}
	log := t.Publisher.Log
	deleted, err := log.Delete(ctx, t.JS)
	if err != nil {
		return err
	}
	if !deleted {
		return errNoLeader
	}
	slog.Warn("The stream of the event log is deleted: its storage has changed", "stream", log.ID.Stream(), "storage",
		log.Storage)
	return errLogDeleted
}

// errNoLeader means that the NATS servers cannot delete the stream now.
var errNoLeader = errors.New("no leader of the NATS servers responds")

// acknowledge records that JetStream has stored messages, and returns the error of a message that it has not.
func (t *term) acknowledge(ack eventlog.Ack) error {
	if ack.ID != (core.ID{}) {
		t.Acknowledged(ack.ID)
		t.failure.Store(nil)
		if t.Publisher.Log.ID == eventlog.Main {
			publishedRevision.Set(float64(t.core.Published))
		}
	}
	return ack.Err
}

// keyOf returns the etcd key of an event's object. It is empty for a custom resource whose event is still encrypted,
// and for a built-in resource of another release.
func (p *Publisher) keyOf(e *logv1.Event) string {
	if st, ok := p.Storage.ByName(e.StorageResource); ok {
		return st.Key(e.Namespace, e.Name)
	}
	if e.Object.GetVersion() == "" { // a custom resource has it
		return ""
	}
	return p.Storage.CustomResourceKey(schema.ParseGroupResource(e.StorageResource), e.Namespace, e.Name)
}

// readEtcd reads the epoch's record, and whether etcd has an event.
func (p *Publisher) readEtcd(ctx context.Context, e core.EtcdEvent) (etcd core.EtcdState, err error) {
	if etcd, err = p.readEpoch(ctx); err == nil {
		err = p.readEvent(ctx, &etcd, e)
	}
	return etcd, err
}

// readEvent sets HasEvent of etcd's state, if the event has a key.
func (p *Publisher) readEvent(ctx context.Context, etcd *core.EtcdState, e core.EtcdEvent) (err error) {
	if e.Key != "" {
		etcd.HasEvent, err = p.hasEvent(ctx, e)
	}
	return err
}

// readEpoch reads the epoch's record, also the record of an older release.
func (p *Publisher) readEpoch(ctx context.Context) (core.EtcdState, error) {
	etcd, err := p.readRecord(ctx)
	if err == nil && etcd.ModRevision == 0 {
		err = p.readOldEpoch(ctx, &etcd)
	}
	return etcd, err
}

// readRecord reads the epoch's record. It is the zero value if there is no record or it cannot be decoded.
func (p *Publisher) readRecord(ctx context.Context) (etcd core.EtcdState, err error) {
	resp, err := p.Etcd.Client.Client.Get(ctx, p.EpochKey())
	if err != nil {
		return etcd, err
	}
	etcd.Revision = resp.Header.Revision
	if len(resp.Kvs) > 0 {
		etcd.ModRevision = resp.Kvs[0].ModRevision
		if err := json.Unmarshal(resp.Kvs[0].Value, &etcd.Epoch); err != nil {
			slog.Warn("The epoch in etcd cannot be decoded; a new one starts", "key", p.EpochKey(), "error", err)
			etcd.Epoch = core.Epoch{}
		}
	}
	return etcd, nil
}

// hasEvent reports whether etcd has an event at its revision. It is true if etcd has compacted the revision.
func (p *Publisher) hasEvent(ctx context.Context, e core.EtcdEvent) (bool, error) {
	resp, err := p.Etcd.Client.Client.Get(ctx, e.Key, clientv3.WithRev(e.Revision), clientv3.WithKeysOnly())
	switch {
	case errors.Is(err, rpctypes.ErrCompacted):
		return true, nil
	case errors.Is(err, rpctypes.ErrFutureRev):
		return false, nil
	case err != nil:
		return false, err
	case e.Deleted && len(resp.Kvs) > 0:
		return false, nil
	case e.Deleted:
		return p.existed(ctx, e.Key, e.Revision-1)
	}
	return len(resp.Kvs) == 1 && resp.Kvs[0].ModRevision == e.Revision, nil
}

// existed reports whether etcd had a key at a revision. It is true if etcd has compacted the revision.
func (p *Publisher) existed(ctx context.Context, key string, revision int64) (bool, error) {
	resp, err := p.Etcd.Client.Client.Get(ctx, key, clientv3.WithRev(revision), clientv3.WithKeysOnly())
	if errors.Is(err, rpctypes.ErrCompacted) {
		return true, nil
	}
	return err == nil && len(resp.Kvs) == 1, err
}

// writeEpoch writes the epoch's record if this publisher is still elected and the mod revision of EpochKey is still
// after (0: the key does not exist). Otherwise it returns core.ErrEpochChanged. rpctypes.ErrNoSpace means that the
// record is not written, that the mod revision is still after, and that no other publisher is elected.
func (p *Publisher) writeEpoch(ctx context.Context, e core.Epoch, after int64) (revision int64, err error) {
	data, err := json.Marshal(e)
	if err != nil {
		return 0, err
	}
	etcd, unchanged := p.Etcd.Client, clientv3.Compare(clientv3.ModRevision(p.EpochKey()), "=", after)
	elected := clientv3.Compare(clientv3.Value(p.electionKey()), "=", p.Identity)
	resp, err := etcd.Txn(ctx).If(elected, unchanged).Then(clientv3.OpPut(p.EpochKey(), string(data))).Commit()
	noSpace := errors.Is(err, rpctypes.ErrNoSpace)
	if noSpace { // the write that raises the alarm is executed, and a later one does not compare
		resp, err = etcd.Txn(ctx).If(unchanged).Then(clientv3.OpGet(p.electionKey())).Commit()
	}
	switch {
	case err != nil:
		return 0, err
	case !resp.Succeeded:
		return 0, core.ErrEpochChanged
	case !noSpace:
		return resp.Header.Revision, nil
	}
	// No candidate holds the key while the publisher leads without a lease.
	if holder := resp.Responses[0].GetResponseRange().Kvs; len(holder) > 0 && string(holder[0].Value) != p.Identity {
		return 0, core.ErrEpochChanged
	}
	return 0, rpctypes.ErrNoSpace
}

// checkToken ends the term if the epoch's record is not this publisher's. Otherwise it publishes the changed sums. The
// open batch does not wait for etcd.
func (t *term) checkToken(ctx context.Context) error {
	if err := t.log.Flush(ctx); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	etcd, err := t.readEpoch(ctx)
	if err == nil {
		t.Check(etcd.Epoch, etcd.Revision)
		t.PublishSums()
	}
	return err
}

// readRevision reads etcd's revision, or the oldest revision that a new log begins with.
func (p *Publisher) readRevision(ctx context.Context, r core.Request) (revision int64, err error) {
	if revision = r.Revision; revision == 0 {
		if revision, err = p.Etcd.ReadRevision(ctx); err != nil {
			return 0, err
		}
	}
	if r.Op == core.ReadRevision {
		return revision, nil
	}
	since, err := p.latestEpochBegin(ctx)
	if err != nil {
		return 0, err
	}
	oldest, err := p.oldestRevision(ctx, revision, maxBacklog, r.Reached)
	return max(oldest, since), err
}

// latestEpochBegin returns the latest revision after which an epoch of any log of this control plane begins. The events
// before it may differ from the events that clients have seen at another host. 0: no log has a later epoch.
func (p *Publisher) latestEpochBegin(ctx context.Context) (since int64, err error) {
	resp, err := p.Etcd.Client.Client.Get(ctx, p.Etcd.OwnKey(logsPrefix), clientv3.WithPrefix())
	if err != nil {
		return 0, err
	}
	for _, kv := range resp.Kvs {
		var e core.Epoch
		if strings.HasSuffix(string(kv.Key), "/epoch") && json.Unmarshal(kv.Value, &e) == nil {
			since = max(since, e.Since)
		}
	}
	return since, nil
}

// maxBacklog is how many revisions a new log holds at most when it begins, unless readers need more. Readers are behind
// until the publisher has published them.
const maxBacklog = 50_000

// maxReaderLag is how many revisions before the observed end a new log begins, if etcd is too large for more history. A
// reader that is further behind then has a gap.
const maxReaderLag = 1_000

// maxBacklogBytes is the largest etcd that a new log is filled from: etcd does not report the size of its events.
const maxBacklogBytes = 512 << 20

// dbSize returns the bytes in use of etcd's database, old revisions included. It is false if no member responds.
func dbSize(ctx context.Context, client *clientv3.Client) (int64, bool) {
	for _, endpoint := range client.Endpoints() {
		statusCtx, cancel := context.WithTimeout(ctx, 2*time.Second)
		status, err := client.Status(statusCtx, endpoint)
		cancel()
		if err == nil {
			return status.DbSizeInUse, true
		}
	}
	return 0, false
}

// oldestRevision returns the oldest readable revision among the last limit revisions before now: etcd has all events
// after it. It returns now if etcd's database exceeds maxBacklogBytes. Neither limit applies to the revisions that
// readers at a revision need; 0: there are no readers.
func (p *Publisher) oldestRevision(ctx context.Context, now, limit, readers int64) (int64, error) {
	client := p.Etcd.Client.Client
	low, high := now-limit, now
	if size, ok := dbSize(ctx, client); !ok || size > maxBacklogBytes {
		low = now
	}
	if readers > 0 {
		low = min(low, readers-maxReaderLag)
	}
	low = max(low, 1)
	for low < high {
		middle := low + (high-low)/2
		_, err := client.Get(ctx, p.EpochKey(), clientv3.WithRev(middle), clientv3.WithCountOnly())
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			low = middle + 1
		case err != nil:
			return 0, err
		default:
			high = middle
		}
	}
	return low, nil
}
