// Package election elects a single registry for a task, by a leased key in etcd. It does not fence the leader's writes:
// each task must refuse the writes of a deposed leader itself.
//
// Run calls lead in the caller's goroutine. A goroutine per term drains the lease's keepalives.
package election

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// leaseSeconds is the TTL of the lease: how long a dead leader blocks the election.
const leaseSeconds = 2

// Run calls lead while this candidate holds key in etcd, and cancels its context when the lease is lost. It returns
// when ctx ends. It calls onOtherLeader whenever it reads that another candidate holds the key.
//
//	candidate ── key absent, lease put ──▶ leader
//	candidate ── key held, or error ──▶ 300 ms ──▶ candidate
//	leader ── lead returns ──▶ resigned ── leaseSeconds ──▶ candidate
//	leader ── lease lost ──▶ candidate
//
// Candidates poll, because a watch per candidate would be watches that etcd has to serve.
func Run(ctx context.Context, client *clientv3.Client, key, identity string, lead func(context.Context) error,
	onOtherLeader func()) error {
	for warned := false; ctx.Err() == nil; {
		lease, err := campaign(ctx, client, key, identity, onOtherLeader)
		if err != nil || lease == nil {
			full := errors.Is(err, rpctypes.ErrNoSpace)
			if full && !warned {
				slog.Warn("etcd has no space for a lease, so no registry can be elected", "key", key)
			}
			warned = full
			if err != nil && ctx.Err() == nil {
				slog.Debug("Election failed", "key", key, "error", err)
			}
			select {
			case <-ctx.Done():
			case <-time.After(300 * time.Millisecond):
			}
			continue
		}
		slog.Info("Elected", "key", key, "identity", identity)
		if holdLease(ctx, client, *lease, lead) {
			select { // it resigned: another candidate goes first
			case <-ctx.Done():
			case <-time.After(leaseSeconds * time.Second):
			}
		}
	}
	return ctx.Err()
}

// campaign acquires the key if it is absent. A nil lease without an error means that another candidate holds it.
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
		revoke, done := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer done()
		_, _ = client.Revoke(revoke, lease.ID)
		return nil, err
	}
	return &lease.ID, nil
}

// holdLease calls lead and keeps the lease alive until it is lost, ctx ends, or lead returns. The last case is a
// resignation, and so is a lease that cannot be kept alive. holdLease revokes the lease in each case,
// also if lead panics.
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
	if err != nil {
		return true // another candidate goes first, instead of a loop of grants and revocations
	}
	go func() {
		for range alive {
		}
		cancel() // the lease ran out, or ctx ended
	}()
	err = lead(leading)
	resigned = leading.Err() == nil
	if err != nil && ctx.Err() == nil {
		slog.Warn("The leader's task ended", "resigned", resigned, "error", err)
	}
	return resigned
}
