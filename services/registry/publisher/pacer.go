package publisher

import (
	"context"
	"time"

	"watershed.dev/platform/lifecycle"
)

// progressResponsePeriod is the least time between two progress responses. A response serves all earlier requests.
// Without the pause, a reader that sends requests in a loop makes etcd respond as fast as it can.
const progressResponsePeriod = 2 * time.Millisecond

// paced returns a channel that repeats its input at most once per progressResponsePeriod, until ctx is done.
func paced(ctx context.Context, requests <-chan struct{}) <-chan struct{} {
	responses := make(chan struct{})
	go func() {
		for {
			select {
			case <-requests:
			case <-ctx.Done():
				return
			}
			select {
			case responses <- struct{}{}:
			case <-ctx.Done():
				return
			}
			if lifecycle.Sleep(ctx, progressResponsePeriod) != nil {
				return
			}
		}
	}()
	return responses
}
