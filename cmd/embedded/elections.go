package embedded

import (
	"context"
	"time"
	_ "unsafe" // for go:linkname

	"github.com/nats-io/nats-server/v2/server"
)

// NATS has no option for these settings of its Raft groups, and its own tests assign the variables. Its defaults, a
// heartbeat a second and elections after 4 to 9 s, are for clusters across continents. The servers of an event log are
// close to each other, and events wait for an election. etcd's defaults are 100 ms, and 1 to 2 s.
//
//go:linkname hbInterval github.com/nats-io/nats-server/v2/server.hbInterval
var hbInterval time.Duration

//go:linkname minElectionTimeout github.com/nats-io/nats-server/v2/server.minElectionTimeout
var minElectionTimeout time.Duration

//go:linkname maxElectionTimeout github.com/nats-io/nats-server/v2/server.maxElectionTimeout
var maxElectionTimeout time.Duration

// A server that knows that its group has no leader campaigns after a random time between these.
//
//go:linkname minCampaignTimeout github.com/nats-io/nats-server/v2/server.minCampaignTimeout
var minCampaignTimeout time.Duration

//go:linkname maxCampaignTimeout github.com/nats-io/nats-server/v2/server.maxCampaignTimeout
var maxCampaignTimeout time.Duration

// lookupRaftNode returns a Raft group of a server by its name, or nil.
//
//go:linkname lookupRaftNode github.com/nats-io/nats-server/v2/server.(*Server).lookupRaftNode
func lookupRaftNode(s *server.Server, group string) server.RaftNode

func init() {
	hbInterval = 100 * time.Millisecond
	minElectionTimeout, maxElectionTimeout = 400*time.Millisecond, 800*time.Millisecond
	minCampaignTimeout, maxCampaignTimeout = 20*time.Millisecond, 100*time.Millisecond
}

// The routes to a lost server close in sequence. After a route has closed, a server looks for lost leaders so many
// times, with this pause.
const (
	lostLooks = 10
	lostPause = 20 * time.Millisecond
)

// campaignForLost campaigns for the Raft groups whose leader is lost, until ctx ends. The routes to a killed server
// close at once, and NATS alone would wait for the election timeout. If a server does not respond but its routes stay
// open, the election timeout still applies.
func (n *NATS) campaignForLost(ctx context.Context) {
	campaigns := map[string]uint64{} // the terms in which this server has campaigned, by group
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.routeClosed:
		}
		for range lostLooks {
			srv := n.running.Load()
			for group, term := range lostGroups(srv) {
				if node := lookupRaftNode(srv, group); node != nil && campaigns[group] != term {
					campaigns[group] = term
					_ = node.Campaign() // fails if this server leads the group now
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-time.After(lostPause):
			}
		}
	}
}

// lostGroups returns the terms of the Raft groups without a route to their leader for which this server must campaign,
// by group. Of the servers with a route, the server with the lowest ID campaigns. Two candidates would split the votes.
func lostGroups(srv *server.Server) map[string]uint64 {
	lost := map[string]uint64{}
	routes, err := srv.Routez(nil)
	if err != nil {
		return lost
	}
	connected := map[string]bool{}
	for _, r := range routes.Routes {
		connected[r.RemoteName] = true
	}
	for _, account := range []string{srv.SystemAccount().Name, logAccount} {
		status := srv.Raftz(&server.RaftzOptions{AccountFilter: account})
		if status == nil {
			continue
		}
		for name, group := range (*status)[account] {
			leader, ok := group.Peers[group.Leader]
			if !ok || connected[leader.Name] {
				continue
			}
			lowest := group.ID
			for id, peer := range group.Peers {
				if connected[peer.Name] {
					lowest = min(lowest, id)
				}
			}
			if lowest == group.ID {
				lost[name] = group.Term
			}
		}
	}
	return lost
}
