// Package election elects a single registry for a task, by a leased key in etcd. It does not fence the leader's writes:
// each task must refuse the writes of a deposed leader itself.
//
// Run calls Lead or LeadWithoutLease in the caller's goroutine. A goroutine per term drains the lease's keepalives, or
// waits for space in etcd.
package election

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/lifecycle"
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
	// run it at a time. Its context ends when etcd has space, or a candidate holds the key. Nil: no candidate leads.
	LeadWithoutLease func(context.Context) error
}

// Run takes part in the election until ctx ends.
//
//	candidate ── key absent, lease put ──▶ leader
//	candidate ── key absent, no space for a lease ──▶ leader without a lease
//	candidate ── key held, or error ──▶ 300 ms ──▶ candidate
//	leader ── Lead returns ──▶ resigned ── leaseSeconds ──▶ candidate
//	leader ── lease lost ──▶ candidate
//	leader without a lease ── space for a lease, or key held ──▶ candidate
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
		default:
			if err != nil && ctx.Err() == nil {
				slog.Debug("Election failed", "key", c.Key, "error", err)
			}
			_ = lifecycle.Sleep(ctx, 300*time.Millisecond)
		}
		if resigned { // another candidate goes first
			_ = lifecycle.Sleep(ctx, leaseSeconds*time.Second)
		}
	}
	return ctx.Err()
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
	return c.runTerm(ctx, leading, c.Lead)
}

// leadWithoutLease calls LeadWithoutLease until it returns, which is a resignation, or an election is possible.
func (c *Candidate) leadWithoutLease(ctx context.Context) (resigned bool) {
	slog.Warn("etcd has no space for a lease; the candidate continues without a lease", "key", c.Key)
	leading, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer cancel()
		for {
			_ = lifecycle.Sleep(leading, leaseSeconds*time.Second)
			if leading.Err() != nil || c.mayCampaign(leading) {
				return
			}
		}
	}()
	return c.runTerm(ctx, leading, c.LeadWithoutLease)
}

// mayCampaign reports whether a candidate holds the key, or etcd grants a lease. An etcd that does not respond ends no
// term.
func (c *Candidate) mayCampaign(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	current, err := c.Client.Get(ctx, c.Key)
	if err != nil || len(current.Kvs) > 0 {
		return err == nil
	}
	lease, err := c.Client.Grant(ctx, leaseSeconds)
	if err == nil {
		c.revoke(ctx, lease.ID)
	}
	return err == nil
}

// runTerm calls lead with the context of a term. It reports whether lead returned before the term ended.
func (c *Candidate) runTerm(ctx, term context.Context, lead func(context.Context) error) (resigned bool) {
	err := lead(term)
	resigned = term.Err() == nil
	if err != nil && ctx.Err() == nil {
		slog.Warn("The leader's task ended", "key", c.Key, "resigned", resigned, "error", err)
	}
	return resigned
}
