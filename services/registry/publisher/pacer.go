package publisher

import (
	"context"
	"time"
)

// askPace is the least time between two progress responses. One response serves all requests before it. Without the
// pace, a reader that sends requests in a loop makes etcd respond as fast as it can.
const askPace = 2 * time.Millisecond

// paced returns a channel that repeats its input at most once per askPace, until ctx is done.
func paced(ctx context.Context, requests <-chan struct{}) <-chan struct{} {
	answer := make(chan struct{})
	go func() {
		for {
			select {
			case <-requests:
			case <-ctx.Done():
				return
			}
			select {
			case answer <- struct{}{}:
			case <-ctx.Done():
				return
			}
			select {
			case <-time.After(askPace):
			case <-ctx.Done():
				return
			}
		}
	}()
	return answer
}
