package embedded

import (
	"time"
	_ "unsafe" // for go:linkname
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

func init() {
	hbInterval = 100 * time.Millisecond
	minElectionTimeout, maxElectionTimeout = 400*time.Millisecond, 800*time.Millisecond
}
