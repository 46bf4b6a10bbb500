package audit

import (
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
)

// maxTextBytes is the maximum length of a client's text in a truncated event, in bytes.
const maxTextBytes = 4 << 10

// truncate returns an event without objects and with shortened texts. It has upstream's mark of a truncated event
// (k8s.io/apiserver/plugin/pkg/audit/truncate).
func truncate(e *auditinternal.Event) *auditinternal.Event {
	out := *e
	out.RequestObject, out.ResponseObject = nil, nil
	out.Annotations = map[string]string{}
	for k, v := range e.Annotations {
		out.Annotations[k] = truncateText(v)
	}
	out.Annotations["audit.k8s.io/truncated"] = "true"
	if e.ObjectRef != nil {
		ref := *e.ObjectRef
		ref.Name, ref.Namespace = truncateText(ref.Name), truncateText(ref.Namespace)
		out.ObjectRef = &ref
	}
	if e.ResponseStatus != nil {
		s := *e.ResponseStatus
		s.Message, s.Details = truncateText(s.Message), nil
		out.ResponseStatus = &s
	}
	return &out
}

func truncateText(text string) string { return text[:min(len(text), maxTextBytes)] }

// truncatingBackend truncates an event that its file rejects. A file rejects a line that is longer than its maximum
// size.
type truncatingBackend struct{ audit.Backend }

// ProcessEvents implements audit.Sink.
func (b truncatingBackend) ProcessEvents(events ...*auditinternal.Event) bool {
	ok := true
	for _, e := range events {
		written := b.Backend.ProcessEvents(e)
		if !written && sizeOf(e) > truncateAbove {
			if written = b.Backend.ProcessEvents(truncate(e)); written {
				truncatedEvents.Inc()
			}
		}
		ok = ok && written
	}
	return ok
}

// truncateAbove is the size in bytes above which an event is written again without its objects after an error. A
// smaller event did not fail because of its size.
const truncateAbove = 128 << 10
