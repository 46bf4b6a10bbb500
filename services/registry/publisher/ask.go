package publisher

import (
	"context"
	"time"
)

// askPace is the least time between two answers to readers that ask for progress. One answer is for all that asked
// before it.
const askPace = 2 * time.Millisecond

// paced returns a channel that repeats asked, at most once in each askPace, until ctx is done.
func paced(ctx context.Context, asked <-chan struct{}) <-chan struct{} {
	answer := make(chan struct{})
	go func() {
		for {
			select {
			case <-asked:
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
