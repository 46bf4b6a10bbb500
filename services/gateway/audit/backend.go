package audit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"
	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/audit/policy"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/util/webhook"
	pluginbuffered "k8s.io/apiserver/plugin/pkg/audit/buffered"
	pluginlog "k8s.io/apiserver/plugin/pkg/audit/log"
	plugintruncate "k8s.io/apiserver/plugin/pkg/audit/truncate"
	pluginwebhook "k8s.io/apiserver/plugin/pkg/audit/webhook"

	"watershed.dev/platform/reload"
)

// Auditor decides what is audited, and writes it. Sink and Policy are nil where nothing is, as the filters want it.
type Auditor struct {
	Sink   audit.Sink
	Policy audit.PolicyRuleEvaluator

	backend audit.Backend
	queues  []*bounded
	stop    chan struct{}
}

// New opens the backends and reads the policy, which files follows. As with kube-apiserver, nothing is audited without
// a policy, or without a backend. dial dials the webhook; nil: directly.
func New(ctx context.Context, c *Config, dial utilnet.DialFunc, files *reload.Files) (*Auditor, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	a := &Auditor{stop: make(chan struct{})}
	p := &currentPolicy{}
	if err := files.LoadAndWatch(ctx, "audit-policy-file", c.PolicyFile, p.read); err != nil {
		return nil, err
	}
	var backends []audit.Backend
	if c.Log.Path != "" && c.PolicyFile != "" {
		w, err := c.Log.open()
		if err != nil {
			return nil, fmt.Errorf("--audit-log-path %q: %w", c.Log.Path, err)
		}
		log := pluginlog.NewBackend(w, c.Log.Format, auditv1.SchemeGroupVersion)
		if c.Log.Format == pluginlog.FormatJson {
			log = &lines{log, w}
		}
		backends = append(backends, c.Log.wrap(a, fitting{log}))
	}
	if file := c.Webhook.ConfigFile; file != "" && c.PolicyFile != "" {
		b, err := pluginwebhook.NewBackend(file, auditv1.SchemeGroupVersion,
			webhook.DefaultRetryBackoffWithInitialDelay(c.Webhook.InitialBackoff), dial)
		if err != nil {
			return nil, fmt.Errorf("--audit-webhook-config-file %q: %w", file, err)
		}
		backends = append(backends, c.Webhook.wrap(a, b))
	}
	if len(backends) == 0 {
		return a, nil
	}
	a.backend = audit.Union(backends...)
	a.Sink, a.Policy = a.backend, p
	return a, a.backend.Run(a.stop)
}

// FlushTimeout is how long Close waits at most.
const FlushTimeout = 10 * time.Second

// Close writes what is queued, or gives it up and counts it where its backend does not take it in time. It is called
// after the last request has ended; what comes later is dropped and counted.
func (a *Auditor) Close() {
	close(a.stop)
	if a.backend == nil {
		return
	}
	flushed := make(chan struct{})
	go func() { defer close(flushed); a.backend.Shutdown() }()
	select {
	case <-flushed:
	case <-time.After(FlushTimeout):
		left := 0
		for _, q := range a.queues {
			left += q.left()
		}
		slog.Error("Audit events are lost: their backend did not take them before the gateway stopped", "events", left)
	}
}

// currentPolicy is the policy as its file says now.
type currentPolicy struct {
	now atomic.Pointer[audit.PolicyRuleEvaluator]
}

func (p *currentPolicy) read(_ context.Context, data []byte) error {
	loaded, err := policy.LoadPolicyFromBytes(data)
	if err != nil {
		return err
	}
	e := policy.NewPolicyRuleEvaluator(loaded)
	p.now.Store(&e)
	return nil
}

// EvaluatePolicyRule implements audit.PolicyRuleEvaluator.
func (p *currentPolicy) EvaluatePolicyRule(attrs authorizer.Attributes) audit.RequestAuditConfig {
	return (*p.now.Load()).EvaluatePolicyRule(attrs)
}

// open opens the file for appending, readable by its owner alone.
func (l *LogConfig) open() (io.Writer, error) {
	if l.Path == "-" {
		return os.Stdout, nil
	}
	if err := os.MkdirAll(filepath.Dir(l.Path), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(l.Path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil || l.MaxSize == 0 {
		return f, err
	}
	return &lumberjack.Logger{
		Filename:   l.Path,
		MaxAge:     l.MaxAge,
		MaxBackups: l.MaxBackups,
		MaxSize:    l.MaxSize,
		Compress:   l.Compress,
	}, f.Close()
}

// wrap hands events to a backend as the flags say.
func (d *delivery) wrap(a *Auditor, b audit.Backend) audit.Backend {
	switch d.Mode {
	case modeBatch:
		q := bound(b, d.Batch, d.BatchBytes)
		a.queues = append(a.queues, q)
		b = q
	case modeBlocking:
		b = ignoreErrors{b}
	}
	if d.TruncateEnabled {
		b = plugintruncate.NewBackend(b, d.Truncate, auditv1.SchemeGroupVersion)
	}
	return b
}

// ignoreErrors lets requests go on that could not be recorded. The backend has counted them.
type ignoreErrors struct{ audit.Backend }

// ProcessEvents implements audit.Sink.
func (i ignoreErrors) ProcessEvents(events ...*auditinternal.Event) bool {
	i.Backend.ProcessEvents(events...)
	return true
}

// bounded queues events for a backend: no more of them, and no more bytes, than it is told. The bytes of those that are
// being sent count, since a server that hangs would otherwise gather them without end (kubernetes 85489).
type bounded struct {
	audit.Backend
	events, bytes int64

	mu sync.Mutex
	// queued are events that are not being sent yet, sending those that are, and held the bytes of both.
	queued, sending, held int64
}

// bound puts a queue before a backend. A batch that is being gathered has room of its own.
func bound(b audit.Backend, c pluginbuffered.BatchConfig, bytes int64) *bounded {
	c.BufferSize += c.MaxBatchSize
	q := &bounded{events: int64(c.BufferSize), bytes: bytes}
	q.Backend = pluginbuffered.NewBackend(releasing{b, q}, c)
	return q
}

// errFull is why an event is dropped, in upstream's words (k8s.io/apiserver/plugin/pkg/audit/buffered).
var errFull = errors.New("audit buffer queue blocked")

// ProcessEvents implements audit.Sink. An event that there is no room for loses its objects, or is dropped and counted
// as upstream's queue does (apiserver_audit_error_total).
func (q *bounded) ProcessEvents(events ...*auditinternal.Event) bool {
	for _, e := range events {
		held := q.hold(e)
		if !held && sizeOf(e) > longText {
			e = short(e)
			if held = q.hold(e); held {
				stripped.Inc()
			}
		}
		if !held {
			audit.HandlePluginError(pluginbuffered.PluginName, errFull, e)
			continue
		}
		q.Backend.ProcessEvents(e)
	}
	return true
}

func (q *bounded) hold(e *auditinternal.Event) bool {
	size := sizeOf(e)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.queued >= q.events || q.held+size > q.bytes {
		return false
	}
	q.queued++
	q.held += size
	return true
}

// left is how many events have not been written.
func (q *bounded) left() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return int(q.queued + q.sending)
}

// releasing tells the queue of what its backend begins with and is done with.
type releasing struct {
	audit.Backend
	from *bounded
}

// ProcessEvents implements audit.Sink.
func (r releasing) ProcessEvents(events ...*auditinternal.Event) bool {
	q, n, size := r.from, int64(len(events)), int64(0)
	for _, e := range events {
		size += sizeOf(e)
	}
	q.mu.Lock()
	q.queued, q.sending = q.queued-n, q.sending+n
	q.mu.Unlock()
	defer func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.sending, q.held = q.sending-n, q.held-size
	}()
	return r.Backend.ProcessEvents(events...)
}

// sizeOf is about what an event takes.
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

// longText is how much of a text that a client chose a short event keeps.
const longText = 4 << 10

// short is an event without what it says of objects' contents, and with no more than the beginning of what else a
// client made long; marked as upstream marks it (k8s.io/apiserver/plugin/pkg/audit/truncate).
func short(e *auditinternal.Event) *auditinternal.Event {
	out := *e
	out.RequestObject, out.ResponseObject = nil, nil
	out.Annotations = map[string]string{}
	for k, v := range e.Annotations {
		out.Annotations[k] = beginning(v)
	}
	out.Annotations["audit.k8s.io/truncated"] = "true"
	if e.ObjectRef != nil {
		ref := *e.ObjectRef
		ref.Name, ref.Namespace = beginning(ref.Name), beginning(ref.Namespace)
		out.ObjectRef = &ref
	}
	if e.ResponseStatus != nil {
		s := *e.ResponseStatus
		s.Message, s.Details = beginning(s.Message), nil
		out.ResponseStatus = &s
	}
	return &out
}

func beginning(text string) string { return text[:min(len(text), longText)] }

// fitting writes an event short where its file does not take it whole: a file takes no line that is longer than itself.
type fitting struct{ audit.Backend }

// ProcessEvents implements audit.Sink.
func (f fitting) ProcessEvents(events ...*auditinternal.Event) bool {
	ok := true
	for _, e := range events {
		written := f.Backend.ProcessEvents(e)
		if !written && sizeOf(e) > shortAbove {
			if written = f.Backend.ProcessEvents(short(e)); written {
				stripped.Inc()
			}
		}
		ok = ok && written
	}
	return ok
}

// shortAbove is from which size an event that could not be written is tried again without its objects: less is not what
// it failed for.
const shortAbove = 128 << 10
