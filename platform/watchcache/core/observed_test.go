package core

import (
	"fmt"
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// A registry that reads a log of ten minutes from its beginning again keeps the newest fencing token, although the log
// has lost its end.
func TestReplacedTokensStayReplaced(t *testing.T) {
	var o ObservedEnd
	const tokens = 60
	observe := func(number int) {
		o.Observe(&logv1.Event{Epoch: "e", Revision: int64(number), FencingToken: fmt.Sprint(number)}, "")
	}
	for number := range tokens {
		observe(number)
	}
	for number := range tokens - 1 {
		observe(number)
		if got, want := o.End().Progress.FencingToken, fmt.Sprint(tokens-1); got != want {
			t.Fatalf("the token is %s after %d again, not %s", got, number, want)
		}
	}
}
