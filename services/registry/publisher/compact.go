package publisher

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
)

// logLostAfter is how long the log may stay at a revision behind etcd's before revisions that it lacks are compacted.
// Without NATS, etcd would otherwise keep every revision until its quota is used up, and then reject writes. Once NATS
// is back, the log is reset, and clients list again.
const logLostAfter = 30 * time.Minute

// logSyncInterval is how long NATS may hold acknowledged messages in the page cache: the default of its sync_interval.
// A power failure loses these messages, and etcd must then still hold their revisions.
const logSyncInterval = 2 * time.Minute

// compaction decides which revisions are compacted. before is etcd's revision an interval ago. end is the end of the
// log, which has reached etcd's revision or moved at the time of moved.
type compaction struct {
	before, end int64
	moved       time.Time
	// synced is an end of the log that NATS has synced to its disk. written was the end at the time of writtenAt.
	synced, written int64
	writtenAt       time.Time
}

// next returns the revision below which etcd is compacted, or 0. revision is etcd's revision now, and end the end of
// the log.
func (c *compaction) next(now time.Time, revision, end int64) (before int64) {
	if end != c.end || end >= revision { // a restored etcd is at an earlier revision
		c.end, c.moved = end, now
	}
	if now.Sub(c.writtenAt) >= logSyncInterval {
		c.synced, c.written, c.writtenAt = c.written, end, now
	}
	before, c.before = c.before, revision
	if now.Sub(c.moved) < logLostAfter { // never compact a revision that the log lacks, or that NATS may still lose
		before = min(before, end, c.synced)
	}
	return before
}

// compact compacts etcd revisions that are older than the interval, while this registry is the leader. It outlives the
// leader's terms, which are shorter than the interval if NATS is away.
func (p *Publisher) compact(ctx context.Context) error {
	tick := time.NewTicker(p.CompactionInterval)
	defer tick.Stop()
	c := compaction{moved: time.Now()}
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		revision, err := p.Etcd.ReadRevision(ctx)
		if err != nil {
			continue
		}
		before := c.next(time.Now(), revision, max(p.published.Load(), p.observed.End().Last.Revision))
		if before > 0 && p.elected.Load() {
			if _, err := p.Etcd.Client.Compact(ctx, before); err != nil && !errors.Is(err, rpctypes.ErrCompacted) {
				slog.Warn("Compaction failed", "revision", before, "error", err)
			}
		}
	}
}
