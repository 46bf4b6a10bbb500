package watchcache

import (
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"

	"watershed.dev/platform/events"
	logv1 "watershed.dev/proto/watershed/log/v1"
)

// Selector reports whether an object of a namespace is selected.
type Selector func(namespace string, o *logv1.Object) bool

// NewSelector returns a selector by namespace, labels and stored fields. An empty namespace selects all namespaces.
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

// Classify returns the watch event of a selection. An object that enters the selection is ADDED. An object that leaves
// it is DELETED, in its last selected state. The type is empty if the selection does not include the event.
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
