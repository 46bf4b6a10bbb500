package embedded

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/lifecycle"
)

// smallDisk mounts a file system of 16 MB until the test ends. It needs root.
func smallDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=16m"); err != nil {
		t.Skipf("a file system cannot be mounted: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Unmount(dir, syscall.MNT_DETACH) }) // NATS leaves files of a failed start open
	return dir
}

// runServer runs the server until the end of f. f receives a client.
func runServer(t *testing.T, n *NATS, f func(jetstream.JetStream)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- lifecycle.Run(ctx, []lifecycle.Runner{n.Runner()}, lifecycle.Observer{}) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	var nc *nats.Conn
	eventually(t, func() (err error) {
		nc, err = nats.Connect("", nats.InProcessServer(n), nats.MaxReconnects(-1),
			nats.ReconnectWait(10*time.Millisecond))
		return err
	})
	defer nc.Close()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	f(js)
}

// A server whose disk was full accepts messages after the disk has space again. It has the messages from before.
func TestNATSRestartsAfterAFullDisk(t *testing.T) {
	n := &NATS{Dir: smallDisk(t)}
	runServer(t, n, func(js jetstream.JetStream) { acceptsAfterAFullDisk(t, n, js) })
}

func acceptsAfterAFullDisk(t *testing.T, n *NATS, js jetstream.JetStream) {
	t.Helper()
	stream, err := js.CreateStream(t.Context(), jetstream.StreamConfig{Name: "log", Subjects: []string{"log"}})
	if err != nil {
		t.Fatal(err)
	}
	publish := func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := js.Publish(ctx, "log", make([]byte, 64<<10))
		return err
	}
	if err := publish(); err != nil {
		t.Fatal(err)
	}
	filler := filepath.Join(n.Dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 32<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	eventually(t, func() error {
		if err := publish(); err == nil {
			return errors.New("a full disk accepts messages")
		}
		if reasons := writeErrors(n.running.Load()); !strings.Contains(strings.Join(reasons, ""), "no space left") {
			return fmt.Errorf("no write error is reported: %q", reasons)
		}
		return nil
	})
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	eventually(t, publish)
	if _, err := stream.GetMsg(t.Context(), 1); err != nil {
		t.Errorf("the first message: %v", err)
	}
}

// A server whose disk is full at its first start is ready after the disk has space.
func TestNATSStartsAfterAFullDisk(t *testing.T) {
	n := clusterOf(t, 1).servers[0] // the server of a cluster writes at its start
	n.Dir = smallDisk(t)
	filler := filepath.Join(n.Dir, "filler")
	if err := os.WriteFile(filler, make([]byte, 32<<20), 0o600); !errors.Is(err, syscall.ENOSPC) {
		t.Fatalf("the disk is not full: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	server, ended := n.Runner(), make(chan error, 1)
	go func() { ended <- server.Run(ctx) }()
	eventually(t, func() error {
		select {
		case err := <-ended:
			t.Fatalf("the server has ended: %v", err)
		default:
		}
		if err := server.Ready.Err(); !errors.Is(err, syscall.ENOSPC) {
			return fmt.Errorf("the server does not wait for the disk: %v", err)
		}
		return nil
	})
	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	eventually(t, server.Ready.Err)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// eventually polls f for 2 minutes until it returns nil.
func eventually(t *testing.T, f func() error) {
	t.Helper()
	err := f()
	for until := time.Now().Add(2 * time.Minute); err != nil && time.Now().Before(until); err = f() {
		time.Sleep(20 * time.Millisecond)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// A message with a wrong expected ID is no error of the disk: a restart would read it again.
func TestDiskErrors(t *testing.T) {
	const stale = "JetStream stream 'log > watershed' is not current"
	for reason, want := range map[string]bool{
		"stream write error: write /x/1.blk: no space left on device": true,
		stale + ": stream write error: last msgid mismatch":           false,
		stale: false,
	} {
		if isDiskError(reason) != want {
			t.Errorf("%s: %v", reason, !want)
		}
	}
}

// A stale replica causes a restart once for each reason, and once a minute. It hides no error of the disk.
func TestStaleReplicas(t *testing.T) {
	const (
		mismatch = `stream write error: last msgid mismatch: "651.0.x" vs `
		a, b, c  = mismatch + `"590.0.y"`, mismatch + `""`, mismatch + `"600.0.y"`
		full     = "stream write error: no space left on device"
	)
	now := time.Now()
	s := staleRestarts{restarted: map[string]bool{}}
	for _, x := range []struct {
		reasons []string
		after   time.Duration
		want    string
	}{
		{nil, 0, ""},
		{[]string{a}, 0, a},
		{[]string{a}, time.Hour, ""},
		{[]string{a, b}, time.Hour, b},
		{[]string{c}, time.Second, ""},
		{[]string{b, c, full}, time.Second, full},
		{[]string{a, b, c}, time.Minute, c},
	} {
		now = now.Add(x.after)
		got := s.restartReason(x.reasons, now)
		if s.record(got, now); got != x.want {
			t.Errorf("%q after %s: %q", x.reasons, x.after, got)
		}
	}
	if isStaleReplica(full) {
		t.Error("a full disk is a stale replica")
	}
}
