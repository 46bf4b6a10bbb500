package publisher

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
)

// The keys of releases that kept them outside of --etcd-prefix.
const (
	oldEpochKey    = "/watershed/history"
	oldElectionKey = "/watershed/publisher"
)

// movedLog is the value of oldElectionKey after an older release's log has moved. It has no lease, so no older
// release is elected.
const movedLog = "the log moved to a newer release"

// readOldEpoch reads the epoch's record of an older release, if it is the epoch of this log. The older release can then
// publish no more. A record of another control plane stays as it is.
func (p *Publisher) readOldEpoch(ctx context.Context, etcd *core.EtcdState) error {
	if p.Log.ID != eventlog.Main {
		return nil
	}
	client := p.Etcd.Client.Client
	resp, err := client.Get(ctx, oldEpochKey)
	if errors.Is(err, rpctypes.ErrPermissionDenied) {
		return nil
	}
	if err != nil || len(resp.Kvs) == 0 {
		return err
	}
	var old core.Epoch
	if json.Unmarshal(resp.Kvs[0].Value, &old) != nil || old.ID == "" || old.ID != p.logEpoch {
		return nil
	}
	txn, err := client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(oldElectionKey), "=", 0)).
		Then(clientv3.OpPut(oldElectionKey, movedLog)).Else(clientv3.OpGet(oldElectionKey)).Commit()
	if err != nil {
		return err
	}
	if !txn.Succeeded {
		if kv := txn.Responses[0].GetResponseRange().Kvs[0]; string(kv.Value) != movedLog {
			return fmt.Errorf("registry %s of an older release still publishes to this log: stop it", kv.Value)
		}
	}
	etcd.Epoch = old
	return nil
}
