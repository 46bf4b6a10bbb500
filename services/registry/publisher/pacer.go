package publisher

import (
	"context"
	"time"
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
			select {
			case <-time.After(progressResponsePeriod):
			case <-ctx.Done():
				return
			}
		}
	}()
	return responses
}
