package audit

import (
	"io"
	"maps"
	"slices"
	"strconv"
	"sync"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	pluginlog "k8s.io/apiserver/plugin/pkg/audit/log"
)

// jsonLogBackend is upstream's log backend in its json format (k8s.io/apiserver/plugin/pkg/audit/log). It writes the
// same bytes at less cost for events without objects, which include all events at level Metadata. Each event is a
// single write.
type jsonLogBackend struct {
	audit.Backend // upstream's; writes events with objects
	out           io.Writer
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 0, 2<<10); return &b }}

// ProcessEvents implements audit.Sink.
func (l *jsonLogBackend) ProcessEvents(events ...*auditinternal.Event) bool {
	ok := true
	for _, e := range events {
		if e.RequestObject != nil || e.ResponseObject != nil {
			ok = l.Backend.ProcessEvents(e) && ok
			continue
		}
		b := buffers.Get().(*[]byte)
		*b = appendEvent((*b)[:0], e)
		if _, err := l.out.Write(*b); err != nil {
			audit.HandlePluginError(pluginlog.PluginName, err, e)
			ok = false
		}
		if cap(*b) <= maxBuffer {
			buffers.Put(b)
		}
	}
	return ok
}

// maxBuffer is the size in bytes above which a buffer does not return to the pool, because annotations may be long.
const maxBuffer = 64 << 10

// appendEvent appends an event without objects as a line of audit.k8s.io/v1 JSON, in the format of encoding/json.
func appendEvent(b []byte, e *auditinternal.Event) []byte {
	b = append(b, `{"kind":"Event","apiVersion":"audit.k8s.io/v1","level":`...)
	b = appendString(b, string(e.Level))
	b = appendString(append(b, `,"auditID":`...), string(e.AuditID))
	b = appendString(append(b, `,"stage":`...), string(e.Stage))
	b = appendString(append(b, `,"requestURI":`...), e.RequestURI)
	b = appendString(append(b, `,"verb":`...), e.Verb)
	b = appendUser(append(b, `,"user":`...), &e.User)
	if e.ImpersonatedUser != nil {
		b = appendUser(append(b, `,"impersonatedUser":`...), e.ImpersonatedUser)
	}
	if m := e.AuthenticationMetadata; m != nil {
		f := fields{append(b, `,"authenticationMetadata":{`...), true}
		f.text("impersonationConstraint", m.ImpersonationConstraint)
		b = append(f.b, '}')
	}
	f := fields{b, false}
	f.texts("sourceIPs", e.SourceIPs)
	f.text("userAgent", e.UserAgent)
	b = f.b
	if r := e.ObjectRef; r != nil {
		f := fields{append(b, `,"objectRef":{`...), true}
		f.text("resource", r.Resource)
		f.text("namespace", r.Namespace)
		f.text("name", r.Name)
		f.text("uid", string(r.UID))
		f.text("apiGroup", r.APIGroup)
		f.text("apiVersion", r.APIVersion)
		f.text("resourceVersion", r.ResourceVersion)
		f.text("subresource", r.Subresource)
		b = append(f.b, '}')
	}
	if e.ResponseStatus != nil {
		b = appendStatus(append(b, `,"responseStatus":`...), e.ResponseStatus)
	}
	b = appendTime(append(b, `,"requestReceivedTimestamp":`...), e.RequestReceivedTimestamp)
	b = appendTime(append(b, `,"stageTimestamp":`...), e.StageTimestamp)
	if len(e.Annotations) > 0 {
		f := fields{append(b, `,"annotations":{`...), true}
		for _, k := range slices.Sorted(maps.Keys(e.Annotations)) {
			f.key(k)
			f.b = appendString(f.b, e.Annotations[k])
		}
		b = append(f.b, '}')
	}
	return append(b, '}', '\n')
}

// fields appends the fields of a JSON object. first is set until it has appended a field.
type fields struct {
	b     []byte
	first bool
}

func (f *fields) key(name string) {
	if !f.first {
		f.b = append(f.b, ',')
	}
	f.first = false
	f.b = append(appendString(f.b, name), ':')
}

// text appends a field, unless its value is empty.
func (f *fields) text(name, value string) {
	if value != "" {
		f.key(name)
		f.b = appendString(f.b, value)
	}
}

func (f *fields) texts(name string, values []string) {
	if len(values) > 0 {
		f.key(name)
		f.b = appendStrings(f.b, values)
	}
}

func appendStrings(b []byte, values []string) []byte {
	if values == nil {
		return append(b, "null"...)
	}
	b = append(b, '[')
	for i, v := range values {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, v)
	}
	return append(b, ']')
}

func appendUser(b []byte, u *authenticationv1.UserInfo) []byte {
	f := fields{append(b, '{'), true}
	f.text("username", u.Username)
	f.text("uid", u.UID)
	f.texts("groups", u.Groups)
	if len(u.Extra) > 0 {
		f.key("extra")
		extra := fields{append(f.b, '{'), true}
		for _, k := range slices.Sorted(maps.Keys(u.Extra)) {
			extra.key(k)
			extra.b = appendStrings(extra.b, u.Extra[k])
		}
		f.b = append(extra.b, '}')
	}
	return append(f.b, '}')
}

func appendStatus(b []byte, s *metav1.Status) []byte {
	if *s == (metav1.Status{Code: s.Code}) && s.Code != 0 { // a successful request
		b = append(b, `{"metadata":{},"code":`...)
		return append(strconv.AppendInt(b, int64(s.Code), 10), '}')
	}
	return append(b, mustMarshal(s)...)
}

func appendTime(b []byte, t metav1.MicroTime) []byte {
	if t.IsZero() {
		return append(b, "null"...)
	}
	b = append(b, '"')
	return append(t.UTC().AppendFormat(b, metav1.RFC3339Micro), '"')
}

// appendString appends a string in the format of encoding/json, which escapes HTML's special characters.
func appendString(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == '"' || c == '\\' || c == '<' || c == '>' || c == '&' {
			return append(b, mustMarshal(s)...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}
