package publisher

import (
	"context"
	"log/slog"
	"time"
)

// compact removes revisions that are older than the interval. Only the leader does.
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
		now, err := p.Storage.ReadRevision(ctx)
		if err != nil {
			continue
		}
		if before = min(before, p.published.Load()); before > 0 { // never what is not in the log yet
			if _, err := p.Storage.Client.Compact(ctx, before); err != nil {
				slog.Warn("Compaction failed", "revision", before, "error", err)
			}
		}
		before = now
	}
}
