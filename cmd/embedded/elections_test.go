package embedded

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// The other servers elect a leader of the log when the routes to the killed leader close. They do not wait for an
// election timeout.
func TestALostLeaderIsReplaced(t *testing.T) {
	c := clusterOf(t, 3)
	members := map[string]member{}
	for _, n := range c.servers {
		members[n.Name] = startMember(t, n)
	}
	log, js := c.log(t)
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
	members[killed].kill(t)
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

// A server closes the routes to a server that does not respond, long before the 60 s of NATS' defaults.
func TestRoutesToASilentServerClose(t *testing.T) {
	t.Parallel()
	c := clusterOf(t, 2)
	silent := startMember(t, c.servers[1])
	srv, err := c.servers[0].start()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Shutdown)
	eventually(t, func() error {
		if srv.NumRoutes() == 0 {
			return errors.New("the servers are not connected")
		}
		return nil
	})
	if err := silent.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error {
		if n := srv.NumRoutes(); n > 0 {
			return fmt.Errorf("%d routes stay open", n)
		}
		return nil
	})
}
