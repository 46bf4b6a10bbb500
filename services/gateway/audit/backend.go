package audit

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"

	"gopkg.in/natefinch/lumberjack.v2"
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
	stop    chan struct{}
}

// New opens the backends and reads the policy, which files follows. As with kube-apiserver, nothing is audited without
// a policy, or without a backend.
func New(ctx context.Context, c *Config, files *reload.Files) (*Auditor, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	a := &Auditor{stop: make(chan struct{})}
	p := &currentPolicy{}
	if err := files.Take(ctx, "audit-policy-file", c.PolicyFile, p.read); err != nil {
		return nil, err
	}
	var backends []audit.Backend
	if c.Log.Path != "" && c.PolicyFile != "" {
		w, err := c.Log.open()
		if err != nil {
			return nil, fmt.Errorf("--audit-log-path %q: %w", c.Log.Path, err)
		}
		backends = append(backends, c.Log.wrap(pluginlog.NewBackend(w, c.Log.Format, auditv1.SchemeGroupVersion)))
	}
	if file := c.Webhook.ConfigFile; file != "" && c.PolicyFile != "" {
		b, err := pluginwebhook.NewBackend(file, auditv1.SchemeGroupVersion,
			webhook.DefaultRetryBackoffWithInitialDelay(c.Webhook.InitialBackoff), nil)
		if err != nil {
			return nil, fmt.Errorf("--audit-webhook-config-file %q: %w", file, err)
		}
		backends = append(backends, c.Webhook.wrap(b))
	}
	if len(backends) == 0 {
		return a, nil
	}
	a.backend = audit.Union(backends...)
	a.Sink, a.Policy = a.backend, p
	return a, a.backend.Run(a.stop)
}

// Close writes what is queued. It is called after the last request has ended.
func (a *Auditor) Close() {
	close(a.stop)
	if a.backend != nil {
		a.backend.Shutdown()
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
func (d *delivery) wrap(b audit.Backend) audit.Backend {
	switch d.Mode {
	case modeBatch:
		b = bound(b, d.Batch, d.BatchBytes)
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

// bounded queues events for a backend: no more of them, and no more bytes, than it is told. Those that are being sent
// count, since a server that hangs would otherwise gather them without end (kubernetes 85489).
type bounded struct {
	audit.Backend
	events, bytes         int64
	heldEvents, heldBytes atomic.Int64
}

func bound(b audit.Backend, c pluginbuffered.BatchConfig, bytes int64) audit.Backend {
	q := &bounded{events: int64(c.BufferSize), bytes: bytes}
	q.Backend = pluginbuffered.NewBackend(releasing{b, q}, c)
	return q
}

// errFull is why an event is dropped, in upstream's words (k8s.io/apiserver/plugin/pkg/audit/buffered).
var errFull = fmt.Errorf("audit buffer queue blocked")

// ProcessEvents implements audit.Sink. An event that there is no room for loses its objects, or is dropped and counted
// as upstream's queue does (apiserver_audit_error_total).
func (q *bounded) ProcessEvents(events ...*auditinternal.Event) bool {
	for _, e := range events {
		if !q.hold(e) {
			e = withoutObjects(e)
			if !q.hold(e) {
				audit.HandlePluginError(pluginbuffered.PluginName, errFull, e)
				continue
			}
			stripped.Inc()
		}
		q.Backend.ProcessEvents(e)
	}
	return true
}

func (q *bounded) hold(e *auditinternal.Event) bool {
	events, bytes := q.heldEvents.Add(1), q.heldBytes.Add(sizeOf(e))
	if events <= q.events && bytes <= q.bytes {
		return true
	}
	q.release(e)
	return false
}

func (q *bounded) release(e *auditinternal.Event) {
	q.heldEvents.Add(-1)
	q.heldBytes.Add(-sizeOf(e))
}

// releasing tells the queue of what its backend is done with.
type releasing struct {
	audit.Backend
	from *bounded
}

// ProcessEvents implements audit.Sink.
func (r releasing) ProcessEvents(events ...*auditinternal.Event) bool {
	defer func() {
		for _, e := range events {
			r.from.release(e)
		}
	}()
	return r.Backend.ProcessEvents(events...)
}

// sizeOf is about what an event takes.
func sizeOf(e *auditinternal.Event) int64 {
	n := 1<<10 + len(e.RequestURI) + len(e.UserAgent)
	for k, v := range e.Annotations {
		n += len(k) + len(v)
	}
	for _, g := range e.User.Groups {
		n += len(g)
	}
	if e.RequestObject != nil {
		n += len(e.RequestObject.Raw)
	}
	if e.ResponseObject != nil {
		n += len(e.ResponseObject.Raw)
	}
	return int64(n)
}

// withoutObjects is an event without what it says of objects' contents, marked as upstream marks it
// (k8s.io/apiserver/plugin/pkg/audit/truncate).
func withoutObjects(e *auditinternal.Event) *auditinternal.Event {
	short := *e
	short.RequestObject, short.ResponseObject = nil, nil
	short.Annotations = map[string]string{"audit.k8s.io/truncated": "true"}
	for k, v := range e.Annotations {
		short.Annotations[k] = v
	}
	return &short
}
