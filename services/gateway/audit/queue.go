package audit

import (
	"errors"
	"sync"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/runtime"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	pluginbuffered "k8s.io/apiserver/plugin/pkg/audit/buffered"
)

// boundedQueue queues events for a backend, with a bound on their number and their bytes. The bytes include events that
// are being sent. Otherwise a server that hangs would make them grow without end (kubernetes 85489).
type boundedQueue struct {
	audit.Backend
	maxEvents, maxBytes int64

	mu sync.Mutex
	// queued is the number of waiting events, sending of events being sent, and usedBytes the bytes of both.
	queued, sending, usedBytes int64
}

// newBoundedQueue returns a queue before a backend. The batch that is being collected does not count against the buffer
// size.
func newBoundedQueue(b audit.Backend, c pluginbuffered.BatchConfig, bytes int64) *boundedQueue {
	c.BufferSize += c.MaxBatchSize
	q := &boundedQueue{maxEvents: int64(c.BufferSize), maxBytes: bytes}
	q.Backend = pluginbuffered.NewBackend(accountingBackend{b, q}, c)
	return q
}

// errFull is the error of a dropped event, with upstream's text (k8s.io/apiserver/plugin/pkg/audit/buffered).
var errFull = errors.New("audit buffer queue blocked")

// ProcessEvents implements audit.Sink. It truncates an event that does not fit. If the event still does not fit, it
// drops and counts the event as upstream's queue does (apiserver_audit_error_total).
func (q *boundedQueue) ProcessEvents(events ...*auditinternal.Event) bool {
	for _, e := range events {
		reserved := q.reserve(e)
		if !reserved && sizeOf(e) > maxTextBytes {
			e = truncate(e)
			if reserved = q.reserve(e); reserved {
				truncatedEvents.Inc()
			}
		}
		if !reserved {
			audit.HandlePluginError(pluginbuffered.PluginName, errFull, e)
			continue
		}
		q.Backend.ProcessEvents(e)
	}
	return true
}

func (q *boundedQueue) reserve(e *auditinternal.Event) bool {
	size := sizeOf(e)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.queued >= q.maxEvents || q.usedBytes+size > q.maxBytes {
		return false
	}
	q.queued++
	q.usedBytes += size
	return true
}

// outstanding returns the number of events that are not yet written.
func (q *boundedQueue) outstanding() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return int(q.queued + q.sending)
}

// accountingBackend updates the queue's counters before and after the backend processes events.
type accountingBackend struct {
	audit.Backend
	queue *boundedQueue
}

// ProcessEvents implements audit.Sink.
func (b accountingBackend) ProcessEvents(events ...*auditinternal.Event) bool {
	q, n, size := b.queue, int64(len(events)), int64(0)
	for _, e := range events {
		size += sizeOf(e)
	}
	q.mu.Lock()
	q.queued, q.sending = q.queued-n, q.sending+n
	q.mu.Unlock()
	defer func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.sending, q.usedBytes = q.sending-n, q.usedBytes-size
	}()
	return b.Backend.ProcessEvents(events...)
}

// sizeOf returns the approximate memory of an event in bytes.
func sizeOf(e *auditinternal.Event) int64 {
	n := 1<<10 + len(e.RequestURI) + len(e.UserAgent)
	for k, v := range e.Annotations {
		n += len(k) + len(v)
	}
	for _, ip := range e.SourceIPs {
		n += 16 + len(ip)
	}
	for _, u := range []*authenticationv1.UserInfo{&e.User, e.ImpersonatedUser} {
		n += userBytes(u)
	}
	if o := e.ObjectRef; o != nil {
		n += len(o.Name) + len(o.Namespace) + len(o.Resource) + len(o.Subresource) + len(o.UID) + len(o.ResourceVersion)
	}
	if s := e.ResponseStatus; s != nil {
		n += len(s.Message) + len(s.Reason)
		if d := s.Details; d != nil {
			n += len(d.Name)
			for _, c := range d.Causes {
				n += 64 + len(c.Message) + len(c.Field)
			}
		}
	}
	for _, o := range []*runtime.Unknown{e.RequestObject, e.ResponseObject} {
		if o != nil {
			n += len(o.Raw)
		}
	}
	return int64(n)
}

func userBytes(u *authenticationv1.UserInfo) (n int) {
	if u == nil {
		return 0
	}
	n = len(u.Username) + len(u.UID)
	for _, g := range u.Groups {
		n += 16 + len(g)
	}
	for k, all := range u.Extra {
		for _, v := range all {
			n += 16 + len(k) + len(v)
		}
	}
	return n
}
