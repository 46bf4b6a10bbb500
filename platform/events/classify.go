package events

import logv1 "watershed.dev/proto/watershed/log/v1"

// The results of Classify: the event is outside the selection, or the type of the watch event.
const (
	Unselected = ""
	Added      = "ADDED"
	Modified   = "MODIFIED"
	// Deleted carries the object as the selection last matched it. That is the event's object if the object was
	// deleted, and the previous object if the object left the selection.
	Deleted = "DELETED"
)

// Classify returns the type of a watch event for a selector that matches the object now, and matched it before. An
// object that enters the selection is ADDED, an object that leaves it is DELETED. left is true if the object still
// exists and no longer matches.
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
