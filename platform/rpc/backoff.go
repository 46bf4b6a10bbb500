package rpc

import (
	"time"

	"google.golang.org/grpc/backoff"
	"k8s.io/apimachinery/pkg/util/wait"
)

// backoffConfig bounds the delay between connection attempts, so that a client finds a restarted replica within a
// second.
var backoffConfig = backoff.Config{
	BaseDelay:  50 * time.Millisecond,
	Multiplier: 1.6,
	Jitter:     0.2,
	MaxDelay:   time.Second,
}

// xdsBackoff bounds the delay before an XDS opens a stream again. It is longer, because each stream has a new
// connection, and all processes connect when an xDS server restarts. They continue with their endpoints meanwhile.
var xdsBackoff = wait.Backoff{
	Duration: 200 * time.Millisecond,
	Factor:   2,
	Jitter:   0.2,
	Steps:    5,
	Cap:      5 * time.Second,
}
