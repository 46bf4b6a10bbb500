package registry

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"time"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
)

// waitForEtcd waits until etcd responds, because some stores read it while they are built. starting receives the reason
// of the wait.
func (s *Service) waitForEtcd(ctx context.Context, starting func(reason error)) error {
	for {
		err := s.resources.Storage.ConnectionError(ctx)
		if err == nil {
			readCtx, cancel := context.WithTimeout(ctx, 5*time.Second)
			_, err = s.resources.Storage.ReadRevision(readCtx)
			cancel()
		}
		if err == nil {
			return nil
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		slog.Warn("etcd does not respond; retrying", "servers", s.config.Storage.Servers, "error", err)
		starting(fmt.Errorf("etcd does not respond at --etcd-servers %s: %w",
			process.Redact(strings.Join(s.config.Storage.Servers, ",")), err))
		_ = lifecycle.Sleep(ctx, etcdRetryPeriod)
	}
}

// etcdRetryPeriod is the pause between two attempts of waitForEtcd.
const etcdRetryPeriod = 200 * time.Millisecond

// etcdCheckPeriod is the interval of checkEtcd.
const etcdCheckPeriod = 250 * time.Millisecond

// checkEtcd reads etcd's revision and sets readiness, until ctx is done.
func (s *Service) checkEtcd(ctx context.Context) error {
	tick := time.NewTicker(etcdCheckPeriod)
	defer tick.Stop()
	for {
		_, err := s.source.CurrentRevision(ctx, s.resources.Storage.Etcd)
		s.tasks.Ready.Set("etcd", err)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
