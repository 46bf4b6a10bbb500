package apiclient

import (
	"context"
	"time"
)

// mostAsked is how often a question is asked at most until it is answered.
const mostAsked = 4

// hedged is the first answer of ask, which is asked once more after each while without one: a process that is frozen
// does not answer, and is given up by its connections after 13 seconds; who is asked next may be another. A failure is
// an answer too.
func hedged[T any](ctx context.Context, while time.Duration, ask func(context.Context) (T, error)) (T, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		value T
		err   error
	}
	answers := make(chan answer, mostAsked)
	again := time.NewTicker(while)
	defer again.Stop()
	for asked := 0; ; {
		if asked < mostAsked {
			asked++
			go func() {
				value, err := ask(ctx)
				answers <- answer{value, err}
			}()
		}
		select {
		case a := <-answers:
			return a.value, a.err
		case <-again.C:
		case <-ctx.Done():
			var none T
			return none, ctx.Err()
		}
	}
}
