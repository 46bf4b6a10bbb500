package core

import (
	"fmt"
	"strconv"
	"strings"

	logv1 "watershed.dev/proto/watershed/log/v1"
)

// ID is the position of an entry: a revision, an index in its transaction, and whether it is progress. A message of the
// stream has the ID of its last entry.
type ID struct {
	Revision int64
	Index    int32
	// Progress is true for progress and for a reset of all resources, because both cover everything up to Revision. The
	// reset of a resource has a position in its transaction, as an event has.
	Progress bool
	// nonce distinguishes equal positions of different publishers or different epochs of etcd.
	nonce string
}

// IDOf returns the id of e from the publisher with the nonce.
func IDOf(e *logv1.Event, nonce string) ID {
	return ID{e.Revision, e.Index, !IsChange(e) && e.StorageResource == "", nonce}
}

func (id ID) String() string {
	prefix := ""
	if id.Progress {
		prefix = "m"
	}
	return prefix + strconv.FormatInt(id.Revision, 10) + "." + strconv.Itoa(int(id.Index)) + "." + id.nonce
}

// ParseID is the inverse of ID.String.
func ParseID(s string) (ID, error) {
	rest, progress := strings.CutPrefix(s, "m")
	parts := strings.SplitN(rest, ".", 3)
	if len(parts) != 3 {
		return ID{}, fmt.Errorf("not an event id: %q", s)
	}
	r, err := strconv.ParseInt(parts[0], 10, 64)
	i, ierr := strconv.ParseInt(parts[1], 10, 32)
	if err != nil || ierr != nil {
		return ID{}, fmt.Errorf("not an event id: %q", s)
	}
	return ID{r, int32(i), progress, parts[2]}, nil
}

// IsChange returns true for the change of an object. Otherwise the event is progress or a reset.
func IsChange(e *logv1.Event) bool {
	return e.Type != logv1.Type_TYPE_UNSPECIFIED && e.Type != logv1.Type_TYPE_RESET
}
