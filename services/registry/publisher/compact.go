package publisher

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// compact compacts etcd revisions that are older than the interval. It runs only on the leader.
func (p *Publisher) compact(ctx context.Context) error {
	tick := time.NewTicker(p.CompactionInterval)
	defer tick.Stop()
	var before int64
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		now, err := p.Etcd.ReadRevision(ctx)
		if err != nil {
			continue
		}
		if before = min(before, p.published.Load()); before > 0 { // never compact a revision that the log lacks
			if _, err := p.Etcd.Client.Compact(ctx, before); err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
				slog.Warn("Compaction failed", "revision", before, "error", err)
			}
		}
		before = now
	}
}
