package core

import (
	"testing"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// A reader resets a resource if it cannot apply an event. The replica applies this reset although the event's position
// has passed.
func TestAResetAfterAFailedEvent(t *testing.T) {
	var r Replica
	reset := func(revision int64, index int32, resource, epoch string, more bool) int {
		return len(r.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: revision, Index: index,
			StorageResource: resource, Epoch: epoch, More: more}))
	}
	if reset(1, 0, "", "e", false) != 1 || reset(5, 3, "pods", "e", true) != 1 {
		t.Fatal("the resets of the log are not applied")
	}
	if reset(5, 3, "pods", "e", true) != 0 {
		t.Error("a repeated reset is applied again")
	}
	if reset(5, 0, "pods", "", false) != 1 {
		t.Error("the reader's reset is not applied")
	}
}
