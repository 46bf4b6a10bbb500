package source

import (
	"errors"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
)

// An etcd that does not respond makes no key unavailable: events of a custom resource would reset it.
func TestAKeyOfAnUnreadResourceIsNotUnavailable(t *testing.T) {
	for code, no := range map[codes.Code]bool{
		codes.Unavailable:      false,
		codes.DeadlineExceeded: false,
		codes.Canceled:         false,
		codes.NotFound:         true,
		codes.Internal:         true,
	} {
		if err := keyError(status.Error(code, "x")); errors.Is(err, eventlog.ErrNoKey) != no {
			t.Errorf("%s: %v", code, err)
		}
	}
}
