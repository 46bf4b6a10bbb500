// Package election has one registry at a time do what only one may.
package election

import (
	"context"
	"log/slog"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
)

// leaseSeconds is how long a dead leader keeps the others waiting.
const leaseSeconds = 2

// Run runs lead whenever this candidate holds key in etcd, and cancels its context when it no longer does. It ends
// with ctx. another is called whenever somebody else is seen to hold the key. Candidates poll, since a waiting watch
// each would be watches that etcd has to serve.
func Run(ctx context.Context, client *clientv3.Client, key, identity string, lead func(context.Context) error,
	onOtherLeader func()) error {
	for ctx.Err() == nil {
		lease, err := campaign(ctx, client, key, identity, onOtherLeader)
		if err != nil || lease == nil {
			if err != nil && ctx.Err() == nil {
				slog.Debug("No election", "key", key, "error", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(300 * time.Millisecond):
			}
			continue
		}
		slog.Info("Elected", "key", key, "identity", identity)
		if holdLease(ctx, client, *lease, lead) {
			select { // it resigned: somebody else is to have a try
			case <-ctx.Done():
			case <-time.After(leaseSeconds * time.Second):
			}
		}
	}
	return ctx.Err()
}

// campaign takes the key if nobody has it. A nil lease means that somebody has.
func campaign(ctx context.Context, client *clientv3.Client, key, identity string,
	onOtherLeader func()) (*clientv3.LeaseID, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	current, err := client.Get(ctx, key)
	if err != nil {
		return nil, err
	}
	if len(current.Kvs) > 0 {
		if string(current.Kvs[0].Value) != identity {
			onOtherLeader()
		}
		return nil, nil
	}
	lease, err := client.Grant(ctx, leaseSeconds)
	if err != nil {
		return nil, err
	}
	resp, err := client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(key), "=", 0)).Then(clientv3.OpPut(key,
		identity, clientv3.WithLease(lease.ID))).Commit()
	if err != nil || !resp.Succeeded {
		_, _ = client.Revoke(context.WithoutCancel(ctx), lease.ID)
		return nil, err
	}
	return &lease.ID, nil
}

// holdLease leads until the lease is lost or ctx ends, or lead gives up, which is a resignation. A panic of lead gives
// the key up too.
func holdLease(ctx context.Context, client *clientv3.Client, lease clientv3.LeaseID,
	lead func(context.Context) error) (resigned bool) {
	leading, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		revoke, done := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer done()
		_, _ = client.Revoke(revoke, lease) // the next leader need not wait
	}()
	alive, err := client.KeepAlive(leading, lease)
	if err == nil {
		go func() {
			for range alive {
			}
			cancel() // the lease ran out, or ctx ended
		}()
		err := lead(leading)
		resigned = leading.Err() == nil
		if err != nil && ctx.Err() == nil {
			slog.Warn("Leading ended", "resigned", resigned, "error", err)
		}
	}
	return resigned
}
