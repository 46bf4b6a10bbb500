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

// Auditor evaluates the audit policy and writes events. Sink and Policy are nil if auditing is disabled, as WithAudit
// requires.
type Auditor struct {
	Sink   audit.Sink
	Policy audit.PolicyRuleEvaluator

	backend audit.Backend
	queues  []*boundedQueue
	stop    chan struct{}
}

// New opens the backends and loads the policy, which files reloads. As in kube-apiserver, auditing needs both a policy
// and a backend. dial dials the webhook. If it is nil, connections are direct.
func New(ctx context.Context, c *Config, dial utilnet.DialFunc, files *reload.Files) (*Auditor, error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	a := &Auditor{stop: make(chan struct{})}
	p := &reloadingPolicy{}
	if err := files.LoadAndWatch(ctx, "audit-policy-file", c.PolicyFile, p.load); err != nil {
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
			log = &jsonLogBackend{log, w}
		}
		backends = append(backends, c.Log.wrap(a, truncatingBackend{log}))
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

// FlushTimeout bounds Close.
const FlushTimeout = 10 * time.Second

// Close writes the queued events. After FlushTimeout it drops the rest and logs their number. The caller calls it after
// the last request of a client has ended. In batch mode, later events are dropped and counted, such as the last events
// of watches from within the process.
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
		lost := 0
		for _, q := range a.queues {
			lost += q.outstanding()
		}
		slog.Error("Audit events lost: the backend did not accept them before shutdown", "events", lost)
	}
}

// reloadingPolicy is the policy in its file's newest valid version.
type reloadingPolicy struct {
	evaluator atomic.Pointer[audit.PolicyRuleEvaluator]
}

func (p *reloadingPolicy) load(_ context.Context, data []byte) error {
	loaded, err := policy.LoadPolicyFromBytes(data)
	if err != nil {
		return err
	}
	e := policy.NewPolicyRuleEvaluator(loaded)
	p.evaluator.Store(&e)
	return nil
}

// EvaluatePolicyRule implements audit.PolicyRuleEvaluator.
func (p *reloadingPolicy) EvaluatePolicyRule(attrs authorizer.Attributes) audit.RequestAuditConfig {
	return (*p.evaluator.Load()).EvaluatePolicyRule(attrs)
}

// open opens the file for appending. Only the owner can read it.
func (l *LogConfig) open() (io.Writer, error) {
	if l.Path == "-" {
		return os.Stdout, nil
	}
	if err := os.MkdirAll(filepath.Dir(l.Path), 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(l.Path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return nil, err
	}
	w := &lineWriter{out: f, partial: endsInPartialLine(l.Path)}
	if l.MaxSize == 0 {
		return w, nil
	}
	w.out = &lumberjack.Logger{
		Filename:   l.Path,
		MaxAge:     l.MaxAge,
		MaxBackups: l.MaxBackups,
		MaxSize:    l.MaxSize,
		Compress:   l.Compress,
	}
	return w, f.Close()
}

// lineWriter begins each event on a line of its own. A killed server or a full disk leaves a part of an event's line.
// Without a line break, the next event would continue that line, and no reader could parse it.
type lineWriter struct {
	mu      sync.Mutex
	out     io.Writer
	partial bool // the last line has no line break
}

// Write implements io.Writer. b is a whole line.
func (w *lineWriter) Write(b []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	line := b
	if w.partial {
		line = append([]byte{'\n'}, b...)
	}
	n, err := w.out.Write(line)
	if n > 0 {
		w.partial = line[n-1] != '\n'
	}
	return max(0, n-(len(line)-len(b))), err
}

// endsInPartialLine returns true for a file whose last line has no line break.
func endsInPartialLine(path string) bool {
	info, err := os.Stat(path)
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 { // opening a pipe would take events from its reader
		return false
	}
	f, err := os.Open(path)
	if err != nil {
		return false
	}
	defer f.Close()
	last := make([]byte, 1)
	_, err = f.ReadAt(last, info.Size()-1)
	return err == nil && last[0] != '\n'
}

// wrap returns a backend with the queue and the truncation that the options require.
func (d *backendOptions) wrap(a *Auditor, b audit.Backend) audit.Backend {
	switch d.Mode {
	case modeBatch:
		q := newBoundedQueue(b, d.Batch, d.BatchBytes)
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

// ignoreErrors lets a request continue if its event cannot be written. The backend counts the error.
type ignoreErrors struct{ audit.Backend }

// ProcessEvents implements audit.Sink.
func (i ignoreErrors) ProcessEvents(events ...*auditinternal.Event) bool {
	i.Backend.ProcessEvents(events...)
	return true
}

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
