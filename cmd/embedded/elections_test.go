package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/rpc"
)

// memberVariable is the environment variable with the NATS server that a child of TestALostLeaderIsReplaced runs.
const memberVariable = "WATERSHED_TEST_NATS"

// TestMain runs the tests, or the server of a child. After a line on its standard input, no election timeout of a child
// passes.
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
			minElectionTimeout, maxElectionTimeout = time.Hour, 2*time.Hour
			time.Sleep(20 * hbInterval) // each heartbeat sets the timers again
			fmt.Println("no elections")
		}
	}()
	if err := n.Runner().Run(context.Background()); err != nil {
		panic(err)
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// The other servers replace the leader of the log although no election timeout passes, because its routes have closed.
func TestALostLeaderIsReplaced(t *testing.T) {
	ids := inner(t)
	servers := map[string]*exec.Cmd{}
	var members []*NATS
	var routes, urls []string
	for i := range 3 {
		n := &NATS{
			Dir:     t.TempDir(),
			Address: freeAddress(t),
			ID:      ids("nats"),
			Name:    fmt.Sprint("nats-", i),
			Cluster: freeAddress(t),
		}
		members = append(members, n)
		routes, urls = append(routes, n.Cluster), append(urls, "tls://"+n.Address)
	}
	var elections []func()
	for _, n := range members {
		n.Routes = routes
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
		servers[n.Name] = cmd
		elections = append(elections, func() {
			fmt.Fprintln(in)
			if !bufio.NewScanner(out).Scan() {
				t.Errorf("%s has stopped", n.Name)
			}
		})
	}
	log := eventlog.Options{URL: strings.Join(urls, ","), Storage: "file", Replicas: 3, Retention: time.Minute, MaxBytes: 1 << 20}
	js := connectLog(t, log, ids("registry"))
	leader := func(not string) (name string) {
		t.Helper()
		for until := time.Now().Add(30 * time.Second); time.Now().Before(until); time.Sleep(50 * time.Millisecond) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			s, err := log.Stream(ctx, js)
			cancel()
			if err != nil {
				continue
			}
			if c := s.CachedInfo().Cluster; c != nil && c.Leader != "" && c.Leader != not && len(c.Replicas) == 2 {
				return c.Leader
			}
		}
		t.Fatalf("no server but %q leads the log", not)
		return ""
	}
	first := leader("")
	for _, end := range elections {
		end()
	}
	if err := servers[first].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	leader(first)
}

// connectLog connects to the log, and repeats that until a server accepts it.
func connectLog(t *testing.T, log eventlog.Options, id rpc.TLS) jetstream.JetStream {
	t.Helper()
	for until := time.Now().Add(30 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		nc, err := log.Connect("registry", id)
		if err == nil {
			t.Cleanup(nc.Close)
			js, err := jetstream.New(nc)
			if err != nil {
				t.Fatal(err)
			}
			return js
		}
		if time.Now().After(until) {
			t.Fatal(err)
		}
	}
}
