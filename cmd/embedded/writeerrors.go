package embedded

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"watershed.dev/platform/lifecycle"
)

const (
	// writeErrorPeriod is how often the server's health is read, and how often the directory is tested after an error.
	writeErrorPeriod = time.Second
	// writtenBytes is how much the directory must accept before the server restarts.
	writtenBytes = 4 << 20
	// staleReplicaPeriod is the least time between two restarts because of a stale replica.
	staleReplicaPeriod = time.Minute
)

// restartAfterWriteErrors restarts the server after an error of the disk, until ctx is done. A stream of JetStream
// rejects every message after such an error, and a server of a cluster disables JetStream, until they restart. A full
// disk is such an error. The directory must accept writes first.
func (n *NATS) restartAfterWriteErrors(ctx context.Context) {
	tick := time.NewTicker(writeErrorPeriod)
	defer tick.Stop()
	logged := false
	stale := staleRestarts{restarted: map[string]bool{}}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		reason := stale.restartReason(writeErrors(n.running.Load()), time.Now())
		if reason == "" {
			logged = false
			continue
		}
		err := n.testWrite()
		if !logged || err == nil {
			slog.Error("JetStream cannot write", "directory", n.Dir, "reason", reason, "test", err)
			logged = true
		}
		if err == nil {
			n.restart()
			stale.record(reason, time.Now())
		}
	}
}

// startOnDisk starts the server. If the start fails while the directory does not accept writes, it starts the server
// again when the directory accepts them. The interrupted start may have left a file with which the next start fails,
// and only the next, so that another follows. A server of a cluster also starts again, once, without damaged storage.
func (n *NATS) startOnDisk(ctx context.Context, ready *lifecycle.Readiness) (*server.Server, error) {
	for interrupted, removed := false, false; ; {
		srv, err := n.start()
		if err == nil {
			return srv, nil
		}
		if !removed {
			var failed error
			if removed, failed = n.removeUnreadable(err); failed != nil {
				return nil, errors.Join(err, failed)
			} else if removed {
				continue
			}
		}
		test := n.testWrite()
		if !isDiskFault(test) && !interrupted {
			return nil, err
		}
		interrupted = test != nil
		slog.Error("NATS cannot start; it starts again when its directory accepts writes", "directory", n.Dir, "error", err,
			"test", test)
		for ; test != nil; test = n.testWrite() {
			ready.Set("nats", test)
			if err := lifecycle.Sleep(ctx, writeErrorPeriod); err != nil {
				return nil, err
			}
		}
	}
}

// isDiskFault reports whether a fault of the disk explains an error of a write. Another error, such as a missing
// permission, ends the start.
func isDiskFault(err error) bool {
	return slices.ContainsFunc([]syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EIO, syscall.EROFS},
		func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// restart stops the server and starts it again. If that fails, the next call starts it.
func (n *NATS) restart() {
	old := n.running.Load()
	old.Shutdown()
	old.WaitForShutdown()
	srv, err := n.start()
	if err != nil {
		slog.Error("NATS cannot restart", "error", err)
		return
	}
	n.running.Store(srv)
	slog.Warn("NATS has restarted after an error of JetStream", "directory", n.Dir)
}

// writeErrors returns the reasons why the server's JetStream cannot write.
func writeErrors(srv *server.Server) []string {
	if !srv.Running() || !srv.JetStreamEnabled() {
		return []string{"JetStream has been disabled"}
	}
	var reasons []string
	for _, e := range srv.Healthz(&server.HealthzOptions{Details: true}).Errors {
		if isDiskError(e.Error) || isStaleReplica(e.Error) {
			reasons = append(reasons, e.Error)
		}
	}
	return reasons
}

// isDiskError reports whether a reason of an unhealthy server is an error of its disk. Other reasons, such as a
// follower that is behind, end without a restart.
func isDiskError(reason string) bool {
	return strings.Contains(reason, "write error") && !isStaleReplica(reason)
}

// isStaleReplica reports whether a replica of the log has stopped because a message expects another last ID. NATS 2.15
// copies the messages of another server to a replica that has lost its disk or its network, and does not update the ID
// of the last. The replica rejects the next message, and never serves again. After a restart, the server has the ID
// from its disk.
func isStaleReplica(reason string) bool { return strings.Contains(reason, "last msgid mismatch") }

// staleRestarts are the restarts because of stale replicas.
type staleRestarts struct {
	restarted map[string]bool // by reason
	last      time.Time
}

// restartReason returns the reason for a restart, or an empty string. A stale replica hides no other reason. A restart
// helps a stale replica once. If the reason stays, the replica's log differs from the publisher's, and the publisher
// deletes the stream.
func (s *staleRestarts) restartReason(reasons []string, now time.Time) string {
	for _, r := range reasons {
		if !isStaleReplica(r) {
			return r
		}
	}
	if now.Sub(s.last) < staleReplicaPeriod {
		return ""
	}
	for _, r := range reasons {
		if !s.restarted[r] {
			return r
		}
	}
	return ""
}

// record records a restart.
func (s *staleRestarts) record(reason string, now time.Time) {
	if isStaleReplica(reason) {
		s.restarted[reason], s.last = true, now
	}
}

// testWrite returns why the directory does not accept writtenBytes.
func (n *NATS) testWrite() error {
	f, err := os.CreateTemp(n.Dir, "test-write-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.Write(make([]byte, writtenBytes)); err != nil {
		return err
	}
	return f.Sync()
}
