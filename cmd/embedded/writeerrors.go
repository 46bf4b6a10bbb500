package embedded

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

const (
	// writeErrorPeriod is how often the server's health is read, and how often the directory is tested after an error.
	writeErrorPeriod = time.Second
	// writtenBytes is how much the directory must accept before the server restarts.
	writtenBytes = 4 << 20
	// lostReplicaPeriod is the least time between two restarts because of a lost replica.
	lostReplicaPeriod = time.Minute
)

// restartAfterWriteErrors restarts the server after an error of the disk, until ctx is done. A stream of JetStream
// rejects every message after such an error, and a server of a cluster disables JetStream, until they restart. A full
// disk is such an error. The directory must accept writes first.
func (n *NATS) restartAfterWriteErrors(ctx context.Context) {
	tick := time.NewTicker(writeErrorPeriod)
	defer tick.Stop()
	logged := false
	var restarted time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		reason := writeError(n.running.Load())
		if reason == "" {
			logged = false
			continue
		}
		if isLostReplica(reason) {
			if time.Since(restarted) < lostReplicaPeriod {
				continue
			}
			restarted = time.Now()
		}
		err := n.testWrite()
		if !logged || err == nil {
			slog.Error("JetStream cannot write", "directory", n.Dir, "reason", reason, "test", err)
			logged = true
		}
		if err == nil {
			n.restart()
		}
	}
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

// writeError returns why the server's JetStream cannot write, or an empty string.
func writeError(srv *server.Server) string {
	if !srv.Running() || !srv.JetStreamEnabled() {
		return "JetStream has been disabled"
	}
	for _, e := range srv.Healthz(&server.HealthzOptions{Details: true}).Errors {
		if isDiskError(e.Error) || isLostReplica(e.Error) {
			return e.Error
		}
	}
	return ""
}

// isDiskError reports whether a reason of an unhealthy server is an error of its disk. Other reasons, such as a
// follower that is behind, end without a restart. NATS 2.15 also reports a message with a wrong expected ID as a write
// error. A restart does not help, because the server reads the message again. The publisher deletes the stream instead.
func isDiskError(reason string) bool {
	return strings.Contains(reason, "write error") && !strings.Contains(reason, "last msgid mismatch")
}

// isLostReplica reports whether a reason is that of a replica that has lost its disk. NATS 2.15 copies the messages of
// another server, and forgets the ID of the last. The next message then has a wrong ID, and NATS stops the replica.
// After a restart, the server has the ID from its disk.
func isLostReplica(reason string) bool {
	return strings.Contains(reason, "last msgid mismatch") && strings.Contains(reason, `vs ""`)
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
