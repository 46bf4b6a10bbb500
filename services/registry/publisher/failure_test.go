package publisher

import (
	"errors"
	"fmt"
	"testing"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
)

// Failure is the cause of a rejected message, not an error that follows from it, until the log acknowledges a message.
func TestFailureIsTheCause(t *testing.T) {
	p := &Publisher{Log: &eventlog.Options{ID: "other"}}
	p.elected.Store(true)
	follows := &jetstream.APIError{ErrorCode: wrongLastID}
	full := &jetstream.APIError{ErrorCode: 10077, Description: "no space left on device"}
	for _, err := range []error{follows, full, follows} {
		p.failed(fmt.Errorf("publish: %w", err))
	}
	if err := p.Failure(); !errors.Is(err, full) {
		t.Errorf("got %v, want %v", err, full)
	}
	term := &term{Publisher: p, Term: p.core.Begin("a-", core.Epoch{}, nil)}
	if err := term.acknowledge(eventlog.Ack{Err: full}); err == nil || p.Failure() == nil {
		t.Error("a rejected message ends the failure")
	}
	if err := term.acknowledge(eventlog.Ack{ID: core.ID{Revision: 1}}); err != nil ||
		p.Failure() != nil {
		t.Errorf("%v; %v stays after an acknowledgement", err, p.Failure())
	}
}
