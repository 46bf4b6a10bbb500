package events

import (
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Start is the beginning of a watch, by the rules of the watch API for resourceVersion and sendInitialEvents
// (https://kubernetes.io/docs/reference/using-api/api-concepts/#semantics-for-watch).
type Start struct {
	// Initial is true if the watch sends all objects as initial events.
	Initial bool
	// At is the position before the first event. With Initial its revision is the minimal revision of the objects. The
	// zero value means now.
	At Position
	// AnyRevision is true if the initial objects may be of any revision.
	AnyRevision bool
}

// StartOf returns the beginning of the watch of r. A resumed watch continues after the last event that it sent.
func StartOf(r *watchfanoutv1.WatchRequest) (Start, error) {
	initial := r.ResourceVersion == "" || r.ResourceVersion == "0"
	if r.SendInitialEvents != nil {
		initial = *r.SendInitialEvents
	}
	if r.ResumeAfter != nil && (!initial || r.InitialEventsDone) {
		return Start{At: FromProto(r.ResumeAfter)}, nil
	}
	switch r.ResourceVersion {
	case "":
		return Start{Initial: initial}, nil
	case "0":
		return Start{Initial: initial, AnyRevision: initial}, nil
	}
	revision, err := strconv.ParseInt(r.ResourceVersion, 10, 64)
	if err != nil {
		return Start{}, apierrors.NewBadRequest("invalid resource version: " + r.ResourceVersion)
	}
	return Start{Initial: initial, At: Position{Revision: revision, Index: LastIndex}}, nil
}
