package eventlog

import (
	"errors"
	"testing"

	"watershed.dev/platform/eventlog"
)

// The first owner that a publisher names owns the stream. Another owner is refused, and its events never enter it.
func TestAStreamHasAnOwner(t *testing.T) {
	c := start(t) // a stream of an older release, which has no owner
	for _, step := range []struct {
		owner   string
		refused bool
	}{{"/registry/watershed/logs/a/", false}, {"/other/watershed/logs/a/", true}, {"/registry/watershed/logs/a/", false}} {
		c.log.Owner = step.owner
		_, err := c.log.Stream(t.Context(), c.js)
		check := c.log.CheckOwner(t.Context(), c.js)
		for _, err := range []error{err, check} {
			if errors.Is(err, eventlog.ErrOtherOwner) != step.refused {
				t.Errorf("%s: %v", step.owner, err)
			}
		}
	}
}
