package storage

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// The keys of releases before log version 2, which had the same keys for every prefix of etcd.
const (
	oldPrefix    = "/watershed/"
	oldEpoch     = oldPrefix + "history"
	oldDataKeys  = oldPrefix + "log-keys/"
	oldPublisher = oldPrefix + "publisher"
)

// oldReleaseTimeout is how long MoveOldKeys waits for the end of an older release's lease, which lasts 2 s.
const oldReleaseTimeout = 6 * time.Second

// MoveOldKeys moves the epoch's record and the data keys of an older release to this log, unless the log has an epoch
// already. Without them, the log would begin another epoch and every client would list again. It returns an error if a
// registry of the older release still publishes. It moves nothing if etcd's RBAC forbids the old keys.
func (l *DataKeys) MoveOldKeys(ctx context.Context, epochKey string) error {
	etcd := l.storage.Client.Client
	for deadline := time.Now().Add(oldReleaseTimeout); ; {
		elected, err := etcd.Get(ctx, oldPublisher)
		if errors.Is(err, rpctypes.ErrPermissionDenied) {
			return nil
		}
		if err != nil {
			return err
		}
		if len(elected.Kvs) == 0 {
			break
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("registry %s of an older release still runs on this etcd; this release needs a stop: "+
				"see docs/operators/upgrade.md", elected.Kvs[0].Value)
		}
		time.Sleep(time.Second / 5)
	}
	old, err := etcd.Get(ctx, oldEpoch)
	if err != nil || len(old.Kvs) == 0 {
		return err
	}
	keys, err := etcd.Get(ctx, oldDataKeys, clientv3.WithPrefix())
	if err != nil {
		return err
	}
	for _, kv := range keys.Kvs {
		if err := l.moveOldKey(ctx, kv); err != nil {
			slog.Warn("A data key of the event log is lost; its resource is reset", "key", kv.Key, "error", err)
		}
	}
	moved, err := etcd.Txn(ctx).
		If(clientv3.Compare(clientv3.CreateRevision(epochKey), "=", 0),
			clientv3.Compare(clientv3.ModRevision(oldEpoch), "=", old.Kvs[0].ModRevision)).
		Then(clientv3.OpPut(epochKey, string(old.Kvs[0].Value)), clientv3.OpDelete(oldPrefix, clientv3.WithPrefix())).
		Commit()
	if err == nil && moved.Succeeded {
		slog.Info("The keys of an older release are moved", "from", oldPrefix, "to", epochKey)
	}
	return err
}

// moveOldKey encrypts a data key again, because its name authenticates it.
func (l *DataKeys) moveOldKey(ctx context.Context, kv *mvccpb.KeyValue) error {
	name := strings.TrimPrefix(string(kv.Key), oldDataKeys)
	resource := name[:max(strings.LastIndexByte(name, '/'), 0)]
	st, ok := l.storage.ByName(resource)
	if !ok {
		return fmt.Errorf("no resource %q", resource)
	}
	secret, _, err := st.transformer.TransformFromStorage(ctx, kv.Value, authenticatedKey(kv.Key))
	if err != nil {
		return err
	}
	wrapped, err := st.transformer.TransformToStorage(ctx, secret, authenticatedKey(l.prefix+name))
	if err != nil {
		return err
	}
	_, err = l.storage.Client.Client.Put(ctx, l.prefix+name, string(wrapped))
	return err
}
