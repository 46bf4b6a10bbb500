package publisher

import (
	"errors"

	"github.com/nats-io/nats.go/jetstream"

	"watershed.dev/platform/watchcache/core"
)

// wrongLastID is JetStream's error for a message whose expected message is not the last. It often follows the rejection
// of the expected message.
const wrongLastID jetstream.ErrorCode = 10070

// failed records the error of a term. The cause of a rejected message replaces the errors that follow from it.
func (p *Publisher) failed(err error) {
	if isRejected(err) {
		p.failure.CompareAndSwap(nil, &err)
		return
	}
	p.failure.Store(&err)
}

// isRejected reports whether JetStream has rejected a message because it expects another message or sequence.
func isRejected(err error) bool {
	var rejected *jetstream.APIError
	return errors.As(err, &rejected) &&
		(rejected.ErrorCode == wrongLastID || rejected.ErrorCode == jetstream.JSErrCodeStreamWrongLastSequence)
}

// isDeposed reports whether another publisher may have appended to the log. Without a lease, core.ErrEpochChanged also
// means that etcd has space again.
func isDeposed(err error) bool {
	return isRejected(err) || errors.Is(err, core.ErrEpochChanged)
}

// Failure returns why this publisher cannot publish now: an error that no acknowledgement has followed.
func (p *Publisher) Failure() error {
	if err := p.failure.Load(); err != nil && p.Elected() {
		return *err
	}
	return nil
}
