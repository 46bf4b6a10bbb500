package embedded

import (
	"context"
	"maps"
	"time"
	_ "unsafe" // for go:linkname

	"github.com/nats-io/nats-server/v2/server"

	"watershed.dev/platform/lifecycle"
)

// NATS has no option for these settings of its Raft groups, and its own tests assign the variables. Its defaults, a
// heartbeat a second and elections after 4 to 9 s, are for clusters across continents. The servers of an event log are
// close to each other, and events wait for an election. etcd's defaults are 100 ms and 1 to 2 s.
//
//go:linkname hbInterval github.com/nats-io/nats-server/v2/server.hbInterval
var hbInterval time.Duration

//go:linkname minElectionTimeout github.com/nats-io/nats-server/v2/server.minElectionTimeout
var minElectionTimeout time.Duration

//go:linkname maxElectionTimeout github.com/nats-io/nats-server/v2/server.maxElectionTimeout
var maxElectionTimeout time.Duration

// Campaign begins an election after a random time between these. NATS' defaults are 100 and 800 ms. CampaignImmediately
// is no alternative, because it counts the votes of servers with empty logs.
//
//go:linkname minCampaignTimeout github.com/nats-io/nats-server/v2/server.minCampaignTimeout
var minCampaignTimeout time.Duration

//go:linkname maxCampaignTimeout github.com/nats-io/nats-server/v2/server.maxCampaignTimeout
var maxCampaignTimeout time.Duration

// lookupRaftNode returns a Raft group of a server by its name, or nil.
//
//go:linkname lookupRaftNode github.com/nats-io/nats-server/v2/server.(*Server).lookupRaftNode
func lookupRaftNode(s *server.Server, group string) server.RaftNode

// natsDefaults are NATS' own values. If a release of NATS removes a variable, the linker makes a variable of value 0.
var natsDefaults = []time.Duration{hbInterval, minElectionTimeout, maxElectionTimeout, minCampaignTimeout,
	maxCampaignTimeout}

func init() {
	hbInterval = 100 * time.Millisecond
	minElectionTimeout, maxElectionTimeout = 400*time.Millisecond, 800*time.Millisecond
	minCampaignTimeout, maxCampaignTimeout = 20*time.Millisecond, 100*time.Millisecond
}

// A server has several routes to each other server, which close in sequence. After a route has closed, campaignForLost
// checks the groups lostChecks times, with a pause of lostPause.
const (
	lostChecks = 10
	lostPause  = 20 * time.Millisecond
)

// campaignForLost campaigns for the Raft groups whose leader is lost, until ctx ends. The routes to a killed server
// close within milliseconds, but NATS waits for the election timeout. If a server does not respond and its routes stay
// open, the election timeout still applies.
func (n *NATS) campaignForLost(ctx context.Context) {
	campaigns := map[string]uint64{} // the last term in which this server has campaigned, by group
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.routeClosed:
		}
		for range lostChecks {
			srv := n.running.Load()
			for name, group := range lostGroups(srv) {
				node := lookupRaftNode(srv, name)
				if node == nil || campaigns[name] == group.Term ||
					node.Term() != group.Term || node.GroupLeader() != group.Leader { // another election has begun
					continue
				}
				campaigns[name] = group.Term
				_ = node.Campaign() // fails if this server leads the group now
			}
			if lifecycle.Sleep(ctx, lostPause); ctx.Err() != nil {
				return
			}
		}
	}
}

// lostGroups returns the Raft groups for which a server must campaign. It reads the groups before the routes: a server
// learns of a leader by a route.
func lostGroups(srv *server.Server) map[string]server.RaftzGroup {
	groups := map[string]server.RaftzGroup{}
	for _, account := range []string{server.DEFAULT_SYSTEM_ACCOUNT, logAccount} {
		if status := srv.Raftz(&server.RaftzOptions{AccountFilter: account}); status != nil {
			maps.Copy(groups, (*status)[account])
		}
	}
	routes, err := srv.Routez(nil)
	if err != nil {
		return nil
	}
	connected := map[string]bool{"": true} // a server without a name has connected, but not by each route
	for _, r := range routes.Routes {
		connected[r.RemoteName] = true
	}
	maps.DeleteFunc(groups, func(_ string, group server.RaftzGroup) bool { return !mustCampaign(group, connected) })
	return groups
}

// mustCampaign reports whether this server campaigns for a group: it has no route to the leader, and the lowest ID of
// the connected servers. Two candidates would split the votes. connected has the names of the servers with a route.
func mustCampaign(group server.RaftzGroup, connected map[string]bool) bool {
	leader, ok := group.Peers[group.Leader] // Peers does not have this server
	if !ok || connected[leader.Name] {
		return false
	}
	for id, peer := range group.Peers {
		if connected[peer.Name] && id < group.ID {
			return false
		}
	}
	return true
}
