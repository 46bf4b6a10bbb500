package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
)

// memberVariable is the environment variable with the NATS server that a child runs, in JSON.
const memberVariable = "WATERSHED_TEST_NATS"

// TestMain runs the tests, or the server of a child. After a line on its standard input, a child has no election
// timeout that passes during the test.
func TestMain(m *testing.M) {
	conf := os.Getenv(memberVariable)
	if conf == "" {
		os.Exit(m.Run())
	}
	var n NATS
	if err := json.Unmarshal([]byte(conf), &n); err != nil {
		panic(err)
	}
	go func() {
		if bufio.NewScanner(os.Stdin).Scan() {
			before := maxElectionTimeout
			minElectionTimeout, maxElectionTimeout = time.Hour, 2*time.Hour
			time.Sleep(2 * before) // the former timeouts have passed, or a heartbeat has replaced them
			fmt.Println("no elections")
		}
	}()
	if err := n.Runner().Run(context.Background()); err != nil {
		panic(err)
	}
}

// member is a NATS server in a process of its own.
type member struct {
	*exec.Cmd
	// disableElections returns once no election timeout passes any more.
	disableElections func()
}

func startMember(t *testing.T, n *NATS) member {
	t.Helper()
	conf, err := json.Marshal(n)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), memberVariable+"="+string(conf))
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return member{cmd, func() {
		fmt.Fprintln(in)
		if !bufio.NewScanner(out).Scan() {
			t.Errorf("%s has stopped", n.Name)
		}
	}}
}

// kill kills the server with SIGKILL, and waits for its end.
func (m member) kill(t *testing.T) {
	t.Helper()
	if err := m.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = m.Wait()
}

// cluster is the servers of a cluster, and the identities of its network.
type cluster struct {
	servers []*NATS
	ids     func(service string) rpc.TLS
}

// secretKey returns the file of a key of JetStream.
func secretKey(t *testing.T) string {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	if err := pki.SecretKey(key); err != nil {
		t.Fatal(err)
	}
	return key
}

// clusterOf returns a cluster whose servers do not run yet.
func clusterOf(t *testing.T, number int) cluster {
	t.Helper()
	c := cluster{ids: inner(t)}
	key := secretKey(t)
	var routes []string
	for i := range number {
		n := &NATS{
			Dir:     t.TempDir(),
			KeyFile: key,
			Address: freeAddress(t),
			ID:      c.ids("nats"),
			Name:    fmt.Sprint("nats-", i),
			Cluster: freeAddress(t),
		}
		c.servers, routes = append(c.servers, n), append(routes, n.Cluster)
	}
	for _, n := range c.servers {
		n.Routes = routes
	}
	return c
}

// log returns the options of an event log with a copy on each server, and registry's client.
func (c cluster) log(t *testing.T) (*eventlog.Options, jetstream.JetStream) {
	t.Helper()
	log := &eventlog.Options{Storage: "file", Replicas: len(c.servers), Retention: time.Minute, MaxBytes: 1 << 20}
	var urls []string
	for _, n := range c.servers {
		urls = append(urls, "tls://"+n.Address)
	}
	log.URL = strings.Join(urls, ",")
	_, js := connectTo(t, log, "registry", c.ids("registry"))
	return log, js
}

// TestAServerThatCopiesTheLogIsNotReady checks that a server without data is ready only when it has the log. A rollout
// of the servers otherwise removes the last copy. Meanwhile a replica is missing.
func TestAServerThatCopiesTheLogIsNotReady(t *testing.T) {
	t.Parallel()
	c := clusterOf(t, 3)
	var last member
	for _, n := range c.servers {
		n.Monitor = freeAddress(t)
		last = startMember(t, n)
	}
	replaced := c.servers[2]
	ready := func() error {
		resp, err := http.Get("http://" + replaced.Monitor + "/readyz")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s", resp.Status, body)
		}
		return nil
	}
	log, js := c.log(t)
	log.MaxBytes = 256 << 20
	eventually(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := log.Stream(ctx, js)
		return err
	})
	missing := func(want int) func() error {
		return func() error {
			if got, err := log.MissingReplicas(t.Context(), js); err != nil || got != want {
				return fmt.Errorf("%d replicas are missing, want %d (%v)", got, want, err)
			}
			return nil
		}
	}
	eventually(t, ready)
	eventually(t, missing(0))
	last.kill(t)
	for range 128 {
		eventually(t, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			_, err := js.Publish(ctx, "watershed.progress", make([]byte, 1<<20))
			return err
		})
	}
	eventually(t, missing(1))
	replaced.Dir = t.TempDir()
	startMember(t, replaced)
	reasons := map[string]bool{}
	eventually(t, func() error {
		err := ready()
		if err != nil {
			reasons[err.Error()] = true
		}
		return err
	})
	if !slices.ContainsFunc(slices.Collect(maps.Keys(reasons)), func(reason string) bool {
		return strings.HasPrefix(reason, "503") && strings.Contains(reason, "watershed")
	}) {
		t.Errorf("it was not ready for other reasons: %q", slices.Collect(maps.Keys(reasons)))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	s, err := log.Stream(ctx, js)
	if err != nil {
		t.Fatal(err)
	}
	have := s.CachedInfo().Cluster
	for _, r := range have.Replicas {
		if r.Name == replaced.Name && (r.Offline || r.Lag > 0) {
			t.Errorf("%s is ready, and has no current copy: %+v", replaced.Name, have)
		}
	}
}
