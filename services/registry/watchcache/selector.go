package watchcache

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Selector says whether a namespace's object is selected.
type Selector func(namespace string, o *logv1.Object) bool

// NewSelector is one of the objects of a namespace, or of all where it is empty, that have labels and stored fields.
func NewSelector(namespace, labelSelector, fieldSelector string) (Selector, error) {
	ls, err := labels.Parse(labelSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	fs, err := fields.ParseSelector(fieldSelector)
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	return func(ns string, o *logv1.Object) bool {
		return o != nil && (namespace == "" || namespace == ns) && ls.Matches(labels.Set(o.Labels)) &&
			fs.Matches(fields.Set(o.Fields))
	}, nil
}

// Classify is an event as a selection sees it: an object that comes into it is ADDED, one that leaves it is DELETED in
// the state that it was last seen in. The type is empty where the event is not of the selection.
func Classify(e *logv1.Event, selector Selector) (event string, o *logv1.Object) {
	now := selector(e.Namespace, e.Object)
	before := now
	if e.Previous != nil {
		before = selector(e.Namespace, e.Previous)
	}
	event, left := events.Classify(e.Type, now, before)
	switch {
	case event == events.Unselected:
		return "", nil
	case left:
		return event, e.Previous
	}
	return event, e.Object
}
