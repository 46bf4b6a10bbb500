package rpc

import (
	"time"

	"google.golang.org/grpc/backoff"
)

// backoffConfig finds a restarted replica again within a second.
var backoffConfig = backoff.Config{
	BaseDelay:  50 * time.Millisecond,
	Multiplier: 1.6,
	Jitter:     0.2,
	MaxDelay:   time.Second,
}
