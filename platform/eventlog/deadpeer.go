package eventlog

import (
	"net"
	"time"

	"github.com/nats-io/nats.go"

	"watershed.dev/platform/usertimeout"
)

// A client leaves the NATS server of a lost host after unacknowledgedTimeout. It leaves a server that does not respond,
// on a host that still acknowledges, with the ping after maxPings. nats.go's defaults are 2 minutes and 2 pings.
const (
	pingInterval = time.Second
	// maxPings leaves time for a response behind a long backlog of messages.
	maxPings = 3
	// unacknowledgedTimeout is how long the peer may not acknowledge data. Without it a write to a lost host blocks for
	// minutes, and nats.go sends no ping meanwhile. A server that does not read for a while, because its disk is slow,
	// acknowledges nothing either once its buffers are full (tcp(7)).
	unacknowledgedTimeout = 3 * time.Second
	// dialTimeout bounds the resolution of a server's name and the dial of its addresses.
	dialTimeout = 4 * time.Second
)

// leaveDeadPeers returns the options by which a client leaves a dead server. nats.go would resolve a server's name
// without a timeout, so the dialer does.
func leaveDeadPeers() []nats.Option {
	dialer := &net.Dialer{Timeout: dialTimeout, Control: usertimeout.Control(unacknowledgedTimeout)}
	return []nats.Option{nats.PingInterval(pingInterval), nats.MaxPingsOutstanding(maxPings), nats.Dialer(dialer),
		nats.SkipHostLookup()}
}
