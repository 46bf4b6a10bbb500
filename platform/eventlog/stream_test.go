package eventlog

import (
	"testing"

	"github.com/nats-io/nats.go/jetstream"
)

// JetStream refuses a stream for want of memory or storage with three codes, of which a cluster's has other causes too.
func TestCannotReserve(t *testing.T) {
	for _, c := range []struct {
		code        jetstream.ErrorCode
		description string
		want        bool
	}{
		{memoryResourcesExceeded, "insufficient memory resources available", true},
		{storageResourcesExceeded, "insufficient storage resources available", true},
		{clusterNoPeers, "no suitable peers for placement, insufficient storage", true},
		{clusterNoPeers, "no suitable peers for placement, peer offline", false},
		{jetstream.JSErrCodeStreamNotFound, "stream not found", false},
	} {
		if got := cannotReserve(&jetstream.APIError{ErrorCode: c.code, Description: c.description}); got != c.want {
			t.Errorf("%d %s: %v", c.code, c.description, got)
		}
	}
}
