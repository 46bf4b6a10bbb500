package events

import (
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// Start is where a watch begins, by the rules of the watch API for resourceVersion and sendInitialEvents
// (https://kubernetes.io/docs/reference/using-api/api-concepts/#semantics-for-watch).
type Start struct {
	// Initial: every object comes first.
	Initial bool
	// At is where events begin; with Initial its revision is what the objects are not to be older than. Its zero value
	// is now.
	At Position
	// AnyRevision: objects of any age will do.
	AnyRevision bool
}

// StartOf is where r begins. One that has been open goes on after the last event that it was sent.
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
