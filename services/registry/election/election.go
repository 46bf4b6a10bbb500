// Package election elects a single registry for a task, by a leased key in etcd. It does not fence the leader's writes:
// each task must refuse the writes of a deposed leader itself.
//
// Run leads in the caller's goroutine. A goroutine per term drains the lease's keepalives, or waits for space in etcd.
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

// Candidate takes part in an election.
type Candidate struct {
	Client *clientv3.Client
	// Key is the election's key in etcd, and Identity the value that this candidate puts.
	Key, Identity string
	// Lead runs while the candidate holds the key. Its context ends when the lease is lost.
	Lead func(context.Context) error
	// LeadWithoutLease runs while no candidate holds the key and etcd has no space for a lease. Several candidates may
	// run it at a time. Its context ends when etcd has space. Nil: no candidate leads then.
	LeadWithoutLease func(context.Context) error
	// OtherLeads is called whenever the candidate reads that another candidate holds the key. Nil: nothing is called.
	OtherLeads func()
}

// Run takes part in the election until ctx ends.
//
//	candidate ── key absent, lease put ──▶ leader
//	candidate ── key absent, no space for a lease ──▶ leader without a lease
//	candidate ── key held, or error ──▶ 300 ms ──▶ candidate
//	leader ── Lead returns ──▶ resigned ── leaseSeconds ──▶ candidate
//	leader ── lease lost ──▶ candidate
//	leader without a lease ── space for a lease ──▶ candidate
//
// Candidates poll, because a watch per candidate would be watches that etcd has to serve.
func (c *Candidate) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		var resigned bool
		switch lease, err := c.campaign(ctx); {
		case lease != nil:
			slog.Info("Elected", "key", c.Key, "identity", c.Identity)
			resigned = c.holdLease(ctx, *lease)
		case errors.Is(err, rpctypes.ErrNoSpace) && c.LeadWithoutLease != nil:
			resigned = c.leadWithoutLease(ctx)
		case err != nil && ctx.Err() == nil:
			slog.Debug("Election failed", "key", c.Key, "error", err)
			fallthrough
		default:
			pause(ctx, 300*time.Millisecond)
		}
		if resigned { // another candidate goes first
			pause(ctx, leaseSeconds*time.Second)
		}
	}
	return ctx.Err()
}

// pause waits for a duration, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// campaign acquires the key if it is absent. A nil lease without an error means that another candidate holds it.
func (c *Candidate) campaign(ctx context.Context) (*clientv3.LeaseID, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	current, err := c.Client.Get(ctx, c.Key)
	if err != nil {
		return nil, err
	}
	if len(current.Kvs) > 0 {
		if string(current.Kvs[0].Value) != c.Identity && c.OtherLeads != nil {
			c.OtherLeads()
		}
		return nil, nil
	}
	lease, err := c.Client.Grant(ctx, leaseSeconds)
	if err != nil {
		return nil, err
	}
	resp, err := c.Client.Txn(ctx).If(clientv3.Compare(clientv3.CreateRevision(c.Key), "=", 0)).Then(
		clientv3.OpPut(c.Key, c.Identity, clientv3.WithLease(lease.ID))).Commit()
	if err != nil || !resp.Succeeded {
		c.revoke(ctx, lease.ID)
		return nil, err
	}
	return &lease.ID, nil
}

// revoke revokes a lease, also after the end of ctx.
func (c *Candidate) revoke(ctx context.Context, lease clientv3.LeaseID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	_, _ = c.Client.Revoke(ctx, lease)
}

// holdLease calls Lead and keeps the lease alive until it is lost, ctx ends, or Lead returns. The last case is a
// resignation, and so is a lease that cannot be kept alive. holdLease revokes the lease in each case, also if Lead
// panics: the next leader need not wait.
func (c *Candidate) holdLease(ctx context.Context, lease clientv3.LeaseID) (resigned bool) {
	leading, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		c.revoke(ctx, lease)
	}()
	alive, err := c.Client.KeepAlive(leading, lease)
	if err != nil {
		return true // another candidate goes first, instead of a loop of grants and revocations
	}
	go func() {
		for range alive {
		}
		cancel() // the lease ran out, or ctx ended
	}()
	return resigns(ctx, leading, c.Lead)
}

// leadWithoutLease calls LeadWithoutLease until it returns, which is a resignation, or etcd has space.
func (c *Candidate) leadWithoutLease(ctx context.Context) (resigned bool) {
	slog.Warn("etcd has no space for a lease, and no candidate holds one; leading without a lease", "key", c.Key)
	leading, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		for pause(leading, leaseSeconds*time.Second); leading.Err() == nil && !c.hasSpace(leading); {
			pause(leading, leaseSeconds*time.Second)
		}
	}()
	return resigns(ctx, leading, c.LeadWithoutLease)
}

// hasSpace reports whether etcd grants a lease. An etcd that does not respond ends no term.
func (c *Candidate) hasSpace(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	lease, err := c.Client.Grant(ctx, leaseSeconds)
	if err == nil {
		c.revoke(ctx, lease.ID)
	}
	return err == nil
}

// resigns calls lead with the context of a term. It reports whether lead returned before the term ended.
func resigns(ctx, term context.Context, lead func(context.Context) error) bool {
	err := lead(term)
	resigned := term.Err() == nil
	if err != nil && ctx.Err() == nil {
		slog.Warn("The leader's task ended", "resigned", resigned, "error", err)
	}
	return resigned
}
