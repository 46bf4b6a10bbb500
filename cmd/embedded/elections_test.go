package embedded

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"watershed.dev/platform/eventlog"
)

// memberVariable is the environment variable with the NATS server that a child of TestALostLeaderIsReplaced runs.
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

// The other servers elect a leader of the log when the routes to the killed leader close. They do not wait for an
// election timeout.
func TestALostLeaderIsReplaced(t *testing.T) {
	ids := inner(t)
	var servers []*NATS
	var routes, urls []string
	for i := range 3 {
		n := &NATS{
			Dir:     t.TempDir(),
			Address: freeAddress(t),
			ID:      ids("nats"),
			Name:    fmt.Sprint("nats-", i),
			Cluster: freeAddress(t),
		}
		servers = append(servers, n)
		routes, urls = append(routes, n.Cluster), append(urls, "tls://"+n.Address)
	}
	members := map[string]member{}
	for _, n := range servers {
		n.Routes = routes
		members[n.Name] = startMember(t, n)
	}
	log := eventlog.Options{
		URL:       strings.Join(urls, ","),
		Storage:   "file",
		Replicas:  3,
		Retention: time.Minute,
		MaxBytes:  1 << 20,
	}
	_, js := connectTo(t, &log, "registry", ids("registry"))
	leader := func(except string) (name string) {
		t.Helper()
		eventually(t, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			s, err := log.Stream(ctx, js)
			if err != nil {
				return err
			}
			c := s.CachedInfo().Cluster
			if c == nil || c.Leader == "" || c.Leader == except || len(c.Replicas) != 2 {
				return fmt.Errorf("no server but %q leads the log: %+v", except, c)
			}
			name = c.Leader
			return nil
		})
		return name
	}
	leader("") // its election needs a timeout
	for _, m := range members {
		m.disableElections()
	}
	killed := leader("")
	if err := members[killed].Process.Kill(); err != nil {
		t.Fatal(err)
	}
	leader(killed)
}

func TestMustCampaign(t *testing.T) {
	for about, c := range map[string]struct {
		leader    string
		connected []string
		want      bool
	}{
		"no leader":                            {"", nil, false},
		"this server leads":                    {"b", nil, false},
		"a route to the leader":                {"c", []string{"of c"}, false},
		"lost leader, lower ID connected":      {"c", []string{"of a"}, false},
		"lost leader, lowest ID connected":     {"a", []string{"of c"}, true},
		"lost leader, no other server":         {"a", nil, true},
		"lost leader that is no longer a peer": {"d", []string{"of c"}, false},
		"leader without a name yet":            {"e", []string{"of c"}, false},
	} {
		group := server.RaftzGroup{ID: "b", Leader: c.leader, Peers: map[string]server.RaftzGroupPeer{
			"a": {Name: "of a"}, "c": {Name: "of c"}, "e": {},
		}}
		connected := map[string]bool{"": true}
		for _, name := range c.connected {
			connected[name] = true
		}
		if got := mustCampaign(group, connected); got != c.want {
			t.Errorf("%s: %v", about, got)
		}
	}
}

// NATS still has the variables that init assigns.
func TestNATSHasTheElectionVariables(t *testing.T) {
	if slices.Contains(natsDefaults, 0) {
		t.Errorf("a release of NATS has removed a variable: %v", natsDefaults)
	}
}
