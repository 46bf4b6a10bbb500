package events

import logv1 "watershed.dev/proto/watershed/log/v1"

// What a selection sees of an event: nothing, or a watch event's type.
const (
	Unselected = ""
	Added      = "ADDED"
	Modified   = "MODIFIED"
	// Deleted is of the object as it was when it was last selected: the event's own where the object is no more, and
	// the one before where it has left the selection.
	Deleted = "DELETED"
)

// Classify is an event as a selection sees it, which selects the object now, and selected it before: an object that
// comes into it is ADDED, one that leaves it is DELETED. left says that the object is there still, and no longer
// selected.
func Classify(t logv1.Type, now, before bool) (event string, left bool) {
	switch t {
	case logv1.Type_TYPE_ADDED:
		if now {
			return Added, false
		}
	case logv1.Type_TYPE_DELETED:
		if before || now {
			return Deleted, false
		}
	case logv1.Type_TYPE_MODIFIED:
		switch {
		case now && before:
			return Modified, false
		case now:
			return Added, false
		case before:
			return Deleted, true
		}
	}
	return Unselected, false
}
