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

	"watershed.dev/platform/watchcache/core"
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
)

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

// readEpoch reads the epoch's record. It is the zero value if there is no record or it cannot be decoded.
func (p *Publisher) readEpoch(ctx context.Context) (etcd core.EtcdState, err error) {
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
