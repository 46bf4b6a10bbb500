package rpc

import (
	"time"

	"google.golang.org/grpc/backoff"
)

// backoffConfig bounds the delay between connection attempts, so that a client finds a restarted replica within a
// second.
var backoffConfig = backoff.Config{
	BaseDelay:  50 * time.Millisecond,
	Multiplier: 1.6,
	Jitter:     0.2,
	MaxDelay:   time.Second,
}
