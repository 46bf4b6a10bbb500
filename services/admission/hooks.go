package admission

import (
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/admission"
	webhookinit "k8s.io/apiserver/pkg/admission/plugin/webhook/initializer"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/informers"
	admissionlisters "k8s.io/client-go/listers/admissionregistration/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/egress"
)

// HookOptions limit the effect of a slow or dead webhook on requests (kubernetes 128162). They are off by default:
// kube-apiserver has no such limits, and calls a webhook until its timeout for every request.
type HookOptions struct {
	// Budget bounds the time that all webhooks with failurePolicy Ignore together may take in a request's mutation, and
	// again in its validation. Calls beyond it fail. 0: bounded only by the webhooks' own timeouts.
	Budget time.Duration
	// Concurrency bounds the concurrent calls of a webhook. Further calls wait within their timeout. 0: unlimited.
	Concurrency int
	// Failures is the number of consecutive failures after which a webhook is not called for Pause. After that, a
	// single request at a time probes it until a call succeeds. Meanwhile calls fail at once, and the failurePolicy
	// applies. 0: no breaker.
	Failures int
	Pause    time.Duration
}

// AddFlags adds every option to fs.
func (o *HookOptions) AddFlags(fs *pflag.FlagSet) {
	fs.DurationVar(&o.Budget, "webhook-ignore-budget", 0,
		"Time that all admission webhooks with failurePolicy Ignore together may take in a request's mutation, and "+
			"again in its validation. Every webhook at their endpoint must have that failurePolicy. 0: as long as "+
			"their own timeouts allow, as in kube-apiserver.")
	fs.IntVar(&o.Concurrency, "webhook-max-concurrent", 0,
		"Concurrent requests of this process to an admission webhook; further requests wait within its timeout. "+
			"0: any number, as in kube-apiserver.")
	fs.IntVar(&o.Failures, "webhook-breaker-failures", 0,
		"Consecutive failures after which an admission webhook is not called for --webhook-breaker-pause. "+
			"It then fails at once, and its failurePolicy decides. 0: it is always called, as in kube-apiserver.")
	fs.DurationVar(&o.Pause, "webhook-breaker-pause", 10*time.Second,
		"How long a failing admission webhook is not called, before one request at a time probes it.")
}

// Validate returns an error that names the invalid flag.
func (o *HookOptions) Validate() error {
	switch {
	case o.Budget < 0:
		return fmt.Errorf("--webhook-ignore-budget %s: want 0 (no budget) or more", o.Budget)
	case o.Concurrency < 0:
		return fmt.Errorf("--webhook-max-concurrent %d: want 0 (any number) or more", o.Concurrency)
	case o.Failures < 0:
		return fmt.Errorf("--webhook-breaker-failures %d: want 0 (no breaker) or more", o.Failures)
	case o.Failures > 0 && o.Pause <= 0:
		return fmt.Errorf("--webhook-breaker-pause %s: want more than 0", o.Pause)
	}
	return nil
}

// Results of a call, as the metrics label result has them.
const (
	succeeded  = "succeeded"
	failed     = "failed"
	overBudget = "over_budget"
	notCalled  = "not_called"
	canceled   = "canceled"
)

var (
	hookCalls = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "watershed_admission_webhook_calls_total",
		Help: "Calls of admission webhooks, by webhook and result: succeeded, failed, canceled (the client is " +
			"gone), over_budget, not_called (the breaker is open).",
	}, []string{"webhook", "result"})
	hooksInFlight = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_admission_webhook_inflight",
		Help: "Calls of admission webhooks in progress or waiting for a slot, by webhook.",
	}, []string{"webhook"})
	hookSeconds = prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "watershed_admission_webhook_seconds",
		Help:    "Duration in seconds of calls of admission webhooks, including the wait for a slot, by webhook.",
		Buckets: []float64{.001, .002, .005, .01, .02, .05, .1, .2, .5, 1, 2, 5, 10, 30},
	}, []string{"webhook"})
	breakersOpen = prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "watershed_admission_webhook_breaker_open",
		Help: "1 while an admission webhook is not called because it has failed, by webhook.",
	}, []string{"webhook"})
)

func hookMetrics() []prometheus.Collector {
	return []prometheus.Collector{hookCalls, hooksInFlight, hookSeconds, breakersOpen}
}

// hooks are the endpoints of the webhooks. Any number of goroutines may call its methods.
type hooks struct {
	options    HookOptions
	mutating   admissionlisters.MutatingWebhookConfigurationLister
	validating admissionlisters.ValidatingWebhookConfigurationLister
	// configured has the endpoints of all webhook configurations, and whether every webhook of the endpoint has
	// failurePolicy Ignore.
	configured atomic.Pointer[map[string]bool]

	mu        sync.Mutex
	endpoints map[string]*endpoint
}

func newHooks(o HookOptions, f informers.SharedInformerFactory) (*hooks, error) {
	a := f.Admissionregistration().V1()
	h := &hooks{
		options:    o,
		mutating:   a.MutatingWebhookConfigurations().Lister(),
		validating: a.ValidatingWebhookConfigurations().Lister(),
		endpoints:  map[string]*endpoint{},
	}
	h.configured.Store(&map[string]bool{})
	changed := cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { h.refresh() },
		UpdateFunc: func(any, any) { h.refresh() },
		DeleteFunc: func(any) { h.refresh() },
	}
	for _, i := range []cache.SharedIndexInformer{a.MutatingWebhookConfigurations().Informer(),
		a.ValidatingWebhookConfigurations().Informer()} {
		if _, err := i.AddEventHandler(changed); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// refresh reads the configured endpoints, and removes the others.
func (h *hooks) refresh() {
	configured := map[string]bool{}
	observe := func(c admissionregistrationv1.WebhookClientConfig, p *admissionregistrationv1.FailurePolicyType) {
		name := ConfiguredEndpoint(c)
		if ignored, ok := configured[name]; name != "" && (!ok || ignored) {
			configured[name] = p != nil && *p == admissionregistrationv1.Ignore
		}
	}
	mutating, _ := h.mutating.List(labels.Everything())
	for _, c := range mutating {
		for _, w := range c.Webhooks {
			observe(w.ClientConfig, w.FailurePolicy)
		}
	}
	validating, _ := h.validating.List(labels.Everything())
	for _, c := range validating {
		for _, w := range c.Webhooks {
			observe(w.ClientConfig, w.FailurePolicy)
		}
	}
	h.configured.Store(&configured)
	h.mu.Lock()
	defer h.mu.Unlock()
	for name := range h.endpoints {
		if _, ok := configured[name]; !ok {
			h.forget(name)
		}
	}
}

// forget removes an endpoint and its metrics. A call in progress records no more of them.
func (h *hooks) forget(name string) {
	e := h.endpoints[name]
	e.mu.Lock()
	defer e.mu.Unlock()
	e.forgotten = true
	delete(h.endpoints, name)
	hookCalls.DeletePartialMatch(prometheus.Labels{"webhook": name})
	hooksInFlight.DeleteLabelValues(name)
	hookSeconds.DeleteLabelValues(name)
	breakersOpen.DeleteLabelValues(name)
}

// ConfiguredEndpoint returns the endpoint of a webhook: host:port and path, as in the request's URL.
func ConfiguredEndpoint(c admissionregistrationv1.WebhookClientConfig) string {
	if s := c.Service; s != nil {
		port, urlPath := int32(443), ""
		if s.Port != nil {
			port = *s.Port
		}
		if s.Path != nil {
			urlPath = *s.Path
		}
		return endpointName(s.Name+"."+s.Namespace+".svc:"+strconv.Itoa(int(port)), urlPath)
	}
	if c.URL == nil {
		return ""
	}
	u, err := url.Parse(*c.URL)
	if err != nil {
		return ""
	}
	return endpointName(u.Host, u.Path)
}

// endpointName returns the name of an endpoint, as metrics show it. It cleans the path as the client does.
func endpointName(host, urlPath string) string {
	return strings.ToValidUTF8(host+path.Clean("/"+urlPath), "\ufffd")
}

// endpoint is a webhook's endpoint that has been called. Its breaker:
//
//	closed ──── Failures consecutive failures ──► open
//	open ────── Pause is over ──────────────────► half-open
//	half-open ─ probe succeeded ────────────────► closed
//	half-open ─ probe failed ───────────────────► open
//
// In the state open calls fail at once; in the state half-open all calls except one probe do.
type endpoint struct {
	name string
	// slots bounds the concurrent calls; nil: unlimited.
	slots chan struct{}

	mu sync.Mutex
	// failures counts consecutive failures. until is the end of the pause. probing: a probe is in progress.
	failures int
	until    time.Time
	probing  bool
	// failing is true if the last call failed, at failedAt.
	failing  bool
	failedAt time.Time
	// forgotten is true once no configuration has the endpoint.
	forgotten bool
}

// State is admission's part of its process's report.
type State struct {
	// Failing are the webhooks whose last call failed, in the order of their endpoints.
	Failing []FailingWebhook `json:"failing,omitempty"`
}

// FailingWebhook is a webhook's endpoint whose last call failed: host:port and path.
type FailingWebhook struct {
	Endpoint string    `json:"endpoint"`
	At       time.Time `json:"at"`
}

// maxFailing bounds the webhooks that a state lists.
const maxFailing = 50

// state returns the webhooks whose last call failed.
func (h *hooks) state() (s State) {
	if h == nil {
		return s
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, name := range slices.Sorted(maps.Keys(h.endpoints)) {
		e := h.endpoints[name]
		e.mu.Lock()
		if e.failing && len(s.Failing) < maxFailing {
			s.Failing = append(s.Failing, FailingWebhook{name, e.failedAt})
		}
		e.mu.Unlock()
	}
	return s
}

func (h *hooks) endpointFor(u *url.URL) *endpoint {
	name := endpointName(u.Host, u.Path)
	h.mu.Lock()
	defer h.mu.Unlock()
	e := h.endpoints[name]
	if e == nil {
		e = &endpoint{name: name}
		if h.options.Concurrency > 0 {
			e.slots = make(chan struct{}, h.options.Concurrency)
		}
		h.endpoints[name] = e
	}
	return e
}

// initializer adds the limits to the clients of webhook plugins. It runs after upstream's initializer, so r already has
// upstream's wrapper.
func (h *hooks) initializer() admission.PluginInitializer {
	return hookInitializer{func(r webhookutil.AuthenticationInfoResolver) webhookutil.AuthenticationInfoResolver {
		return &webhookutil.AuthenticationInfoResolverDelegator{
			ClientConfigForFunc: func(hostPort string) (*rest.Config, error) {
				return h.wrapConfig(r.ClientConfigFor(hostPort))
			},
			ClientConfigForServiceFunc: func(service, namespace string, port int) (*rest.Config, error) {
				return h.wrapConfig(r.ClientConfigForService(service, namespace, port))
			},
		}
	}}
}

type hookInitializer struct {
	wrapper webhookutil.AuthenticationInfoResolverWrapper
}

func (i hookInitializer) Initialize(plugin admission.Interface) {
	if w, ok := plugin.(webhookinit.WantsAuthenticationInfoResolverWrapper); ok {
		w.SetAuthenticationInfoResolverWrapper(i.wrapper)
	}
}

func (h *hooks) wrapConfig(c *rest.Config, err error) (*rest.Config, error) {
	if err != nil {
		return nil, err
	}
	c = rest.CopyConfig(c) // it may be shared
	c.Wrap(func(next http.RoundTripper) http.RoundTripper {
		return &hookTransport{h, egress.LimitResponses(next, maxResponseBytes, 0)}
	})
	return c, nil
}

// maxResponseBytes bounds a webhook's response. A patch of an object of 3 MB is smaller.
const maxResponseBytes = 16 << 20

var (
	errBreakerOpen = errors.New("the webhook is not called for now because it has failed (--webhook-breaker-failures)")
	errOverBudget  = errors.New("the request's time for webhooks with failurePolicy Ignore is spent " +
		"(--webhook-ignore-budget)")
)
