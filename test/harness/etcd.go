package harness

import (
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"watershed.dev/platform/porttest"
)

// Etcd starts etcd on loopback and returns its URL.
func Etcd(t testing.TB, dir string) string {
	return NewMember(t, dir).URL
}

// Member is an etcd member on loopback that a test can stop, restore from a backup and start again.
type Member struct {
	t         testing.TB
	dir, peer string
	URL       string
	process   *Process
}

// NewMember starts a single-member etcd with its data under dir.
func NewMember(t testing.TB, dir string) *Member {
	m := &Member{
		t:    t,
		dir:  dir,
		URL:  fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t)),
		peer: fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t)),
	}
	m.Start()
	return m
}

// Start starts etcd with the data that its data directory holds.
func (m *Member) Start() {
	m.t.Helper()
	m.process = Start(m.t, m.dir, "etcd", Peer("etcd"), "--name", "e", "--data-dir", filepath.Join(m.dir, "etcd-data"),
		"--listen-client-urls", m.URL, "--advertise-client-urls", m.URL,
		"--listen-peer-urls", m.peer, "--initial-advertise-peer-urls", m.peer, "--initial-cluster", "e="+m.peer,
		"--log-level", "error")
	client := &http.Client{Timeout: 5 * time.Second}
	Eventually(m.t, Soon, func() error { return get(client, m.URL+"/health") })
}

// Stop stops etcd with SIGTERM.
func (m *Member) Stop() { m.process.Stop() }

// Etcdctl returns an etcdctl command with more time than its 5 s, for a busy machine.
func Etcdctl(args ...string) *exec.Cmd {
	return exec.Command(Peer("etcdctl"), append([]string{"--command-timeout=1m"}, args...)...)
}

// Restore replaces the member's data with a backup, as etcdutl does. The member must be stopped.
func (m *Member) Restore(backup string) {
	m.t.Helper()
	data := filepath.Join(m.dir, "etcd-data")
	if err := os.RemoveAll(data); err != nil {
		m.t.Fatal(err)
	}
	if out, err := exec.Command(Peer("etcdutl"), "snapshot", "restore", backup, "--name", "e", "--data-dir", data,
		"--initial-cluster", "e="+m.peer, "--initial-advertise-peer-urls", m.peer).CombinedOutput(); err != nil {
		m.t.Fatalf("%v\n%s", err, out)
	}
}
