package publisher

import (
	"context"
	"errors"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/watchcache/core"
)

// maxBacklog is how many revisions a new log holds at most when it begins, unless readers need more. Readers are behind
// until the publisher has published them.
const maxBacklog = 50_000

// maxReaderLag is how many revisions before the observed end a new log begins, if etcd is too large for more history. A
// reader that is further behind then has a gap.
const maxReaderLag = 1_000

// maxBacklogBytes is the largest etcd that a new log is filled from: etcd does not report the size of its events.
const maxBacklogBytes = 512 << 20

// readRevision reads etcd's revision, or the oldest revision that a new log begins with.
func (p *Publisher) readRevision(ctx context.Context, r core.Request) (revision int64, err error) {
	if revision = r.Revision; revision == 0 {
		if revision, err = p.Etcd.ReadRevision(ctx); err != nil {
			return 0, err
		}
	}
	if r.Op == core.ReadRevision {
		return revision, nil
	}
	since, err := p.latestEpochBegin(ctx)
	if err != nil {
		return 0, err
	}
	oldest, err := p.oldestRevision(ctx, revision, maxBacklog, r.Reached)
	return max(oldest, since), err
}

// oldestRevision returns the oldest readable revision among the last limit revisions before now: etcd has all events
// after it. It returns now if etcd's database exceeds maxBacklogBytes. Neither limit applies to the revisions that
// readers at a revision need; 0: there are no readers.
func (p *Publisher) oldestRevision(ctx context.Context, now, limit, readers int64) (int64, error) {
	client := p.Etcd.Client.Client
	low, high := now-limit, now
	if size, ok := dbSize(ctx, client); !ok || size > maxBacklogBytes {
		low = now
	}
	if readers > 0 {
		low = min(low, readers-maxReaderLag)
	}
	low = max(low, 1)
	for low < high {
		middle := low + (high-low)/2
		_, err := client.Get(ctx, p.EpochKey(), clientv3.WithRev(middle), clientv3.WithCountOnly())
		switch {
		case errors.Is(err, rpctypes.ErrCompacted):
			low = middle + 1
		case err != nil:
			return 0, err
		default:
			high = middle
		}
	}
	return low, nil
}

// dbSize returns the bytes in use of etcd's database, old revisions included. It is false if no member responds.
func dbSize(ctx context.Context, client *clientv3.Client) (int64, bool) {
	for _, endpoint := range client.Endpoints() {
		statusCtx, cancel := context.WithTimeout(ctx, 2*time.Second)
		status, err := client.Status(statusCtx, endpoint)
		cancel()
		if err == nil {
			return status.DbSizeInUse, true
		}
	}
	return 0, false
}
