package registry

import (
	"context"
	"time"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
)

const (
	// sweepPeriod is how often sweep runs, and how long the events of the log stay for the readers of this process
	// without a reader.
	sweepPeriod = 30 * time.Second
	// maxCacheIdle is how long an object stays in the caches of storage without use. Clients that use an object
	// repeatedly mostly do so within seconds: they change its status, or renew a Lease.
	maxCacheIdle = time.Minute
)

// sweep periodically drops cached objects that no request has used lately, and packs recent events. A registry at rest
// then holds few objects.
func (s *Service) sweep(ctx context.Context) error {
	for lifecycle.Sleep(ctx, sweepPeriod) == nil {
		s.resources.Storage.SweepCaches(maxCacheIdle)
		eventlog.SweepAppended(sweepPeriod)
		for _, l := range s.logs {
			l.watchCache.Sweep()
		}
	}
	return nil
}
