package audit

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/audit/policy"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/util/webhook"
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
