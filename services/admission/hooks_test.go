package admission

import (
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apiserver/pkg/admission"
	webhookutil "k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"
)

// hook is a webhook's server, as its client's transport.
type hook struct {
	mu    sync.Mutex
	calls int
	most  int
	now   int
	// takes is the delay of a response, and code its status; 0: no response.
	takes time.Duration
	code  int
}

func (h *hook) RoundTrip(req *http.Request) (*http.Response, error) {
	h.mu.Lock()
	h.calls++
	h.now++
	h.most = max(h.most, h.now)
	takes, code := h.takes, h.code
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.now--
	}()
	select {
	case <-req.Context().Done():
		return nil, req.Context().Err()
	case <-time.After(takes):
	}
	if code == 0 {
		return nil, errors.New("connection refused")
	}
	return &http.Response{StatusCode: code, Body: io.NopCloser(strings.NewReader("{}"))}, nil
}

func (h *hook) called() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.calls
}

const hookURL = "https://hook.ns.svc:443/review?timeout=10s"

func transportTo(h *hook, o HookOptions, ignored bool) *hookTransport {
	all := &hooks{options: o, endpoints: map[string]*endpoint{}}
	all.configured.Store(&map[string]bool{"hook.ns.svc:443/review": ignored})
	return &hookTransport{all, h}
}

func call(ctx context.Context, t *testing.T, to *hookTransport) error {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, hookURL, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := to.RoundTrip(req)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

func TestAFailingHookOpensItsBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hook{}
		to := transportTo(h, HookOptions{Failures: 3, Pause: 10 * time.Second}, false)
		for range 3 {
			if err := call(t.Context(), t, to); err == nil || errors.Is(err, errBreakerOpen) {
				t.Errorf("a failure is not returned: %v", err)
			}
		}
		if err := call(t.Context(), t, to); !errors.Is(err, errBreakerOpen) || h.called() != 3 {
			t.Errorf("the webhook is called again: %v, %d calls", err, h.called())
		}
		time.Sleep(11 * time.Second)       // of synctest's clock: past the pause
		h.code, h.takes = 500, time.Second // a single probe fails
		var wg sync.WaitGroup
		for range 5 {
			wg.Go(func() { _ = call(t.Context(), t, to) })
		}
		wg.Wait()
		if h.called() != 4 {
			t.Errorf("%d calls: more than one probe", h.called())
		}
		time.Sleep(11 * time.Second) // past the pause again
		gone, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		if err := call(gone, t, to); !errors.Is(
			err,
			context.Canceled,
		// The result does not count, and another call may probe.
		) {
			t.Error(err)
		}
		h.code, h.takes = 200, 0
		for range 3 {
			if err := call(t.Context(), t, to); err != nil {
				t.Errorf("the webhook works again: %v", err)
			}
		}
	})
}

// A call that ends after its webhook's configuration was deleted leaves no metrics.
func TestAForgottenHookHasNoMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		to := transportTo(&hook{takes: time.Second}, HookOptions{Failures: 1, Pause: 10 * time.Second}, false)
		var wg sync.WaitGroup
		wg.Go(func() { _ = call(t.Context(), t, to) })
		synctest.Wait()
		to.hooks.mu.Lock()
		to.hooks.forget("hook.ns.svc:443/review")
		to.hooks.mu.Unlock()
		wg.Wait()
		for _, c := range hookMetrics() {
			if n := testutil.CollectAndCount(c); n != 0 {
				t.Errorf("%d series of %T", n, c)
			}
		}
	})
}

func TestAHookIsSentSoManyRequestsAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hook{code: 200, takes: time.Second}
		to := transportTo(h, HookOptions{Concurrency: 2}, false)
		var wg sync.WaitGroup
		for range 6 {
			wg.Go(func() {
				if err := call(t.Context(), t, to); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if h.most != 2 || h.called() != 6 {
			t.Errorf("%d calls, %d at a time", h.called(), h.most)
		}
		timed, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		h.takes = time.Hour
		for range 3 { // the third gets no slot within its timeout
			wg.Go(func() {
				if err := call(timed, t, to); !errors.Is(err, context.DeadlineExceeded) {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if h.called() != 8 {
			t.Errorf("%d calls", h.called())
		}
	})
}

func TestHooksThatMayBeIgnoredHaveABudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hook{code: 200, takes: 400 * time.Millisecond}
		o := HookOptions{Budget: time.Second}
		to := transportTo(h, o, true)
		ctx, began := to.hooks.withBudget(t.Context()), time.Now()
		for n := range 10 {
			err := call(ctx, t, to)
			if over := errors.Is(err, errOverBudget); over != (n >= 2) || !over && err != nil {
				t.Errorf("call %d: %v", n, err)
			}
		}
		if spent := time.Since(began); spent != time.Second {
			t.Errorf("ten calls take %s of a budget of a second", spent)
		}
		must, began := transportTo(h, o, false), time.Now()
		ctx = must.hooks.withBudget(t.Context())
		for range 5 {
			if err := call(ctx, t, must); err != nil {
				t.Errorf("a webhook with failurePolicy Fail: %v", err)
			}
		}
		if spent := time.Since(began); spent != 2*time.Second {
			t.Errorf("five calls take %s", spent)
		}
	})
}

// A timeout that a client sets for its own request does not count as a webhook's failure.
func TestAClientsTimeoutOpensNoBreaker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := &hook{code: 200, takes: 100 * time.Millisecond}
		to := transportTo(h, HookOptions{Failures: 1, Pause: time.Hour}, false)
		for range 3 {
			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			if err := call(to.hooks.withBudget(short), t, to); !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
			cancel()
		}
		if err := call(to.hooks.withBudget(t.Context()), t, to); err != nil {
			t.Error(err)
		}
	})
}

// A call whose budget earlier calls have spent does not count as a failure.
func TestTheLastOfABudgetIsNotToBlame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow, quick := &hook{code: 200, takes: 900 * time.Millisecond}, &hook{code: 200, takes: 200 * time.Millisecond}
		o := HookOptions{Budget: time.Second, Failures: 1, Pause: time.Hour}
		to := transportTo(slow, o, true)
		for range 5 {
			ctx := to.hooks.withBudget(t.Context())
			to.next = slow
			if err := call(ctx, t, to); err != nil {
				t.Error(err)
			}
			to.next = quick
			if err := call(ctx, t, to); !errors.Is(err, errOverBudget) {
				t.Errorf("100 ms are left: %v", err)
			}
		}
	})
}

func TestEndpointsAreNamedAsTheyAreCalled(t *testing.T) {
	port, path, url := int32(8443), "/review", "https://hooks.example:444/a/b?x=y"
	slashes, odd, space := "https://hooks.example//a/", "https://hooks.example/%ff", "https://hooks.example/a%20b"
	service := func(port *int32, path *string) admissionregistrationv1.WebhookClientConfig {
		return admissionregistrationv1.WebhookClientConfig{
			Service: &admissionregistrationv1.ServiceReference{Name: "s", Namespace: "n", Port: port, Path: path},
		}
	}
	for want, c := range map[string]admissionregistrationv1.WebhookClientConfig{
		"s.n.svc:443/":          service(nil, nil),
		"s.n.svc:8443/review":   service(&port, &path),
		"hooks.example:444/a/b": {URL: &url},
		"hooks.example/a":       {URL: &slashes},
		"hooks.example/\ufffd":  {URL: &odd},
		"hooks.example/a b":     {URL: &space},
		"":                      {},
	} {
		if got := ConfiguredEndpoint(c); got != want {
			t.Errorf("%q, not %q", got, want)
		}
	}
}

func TestHookOptionsAreChecked(t *testing.T) {
	for want, o := range map[string]HookOptions{
		"--webhook-ignore-budget -1s":   {Budget: -time.Second},
		"--webhook-max-concurrent -1":   {Concurrency: -1},
		"--webhook-breaker-failures -1": {Failures: -1},
		"--webhook-breaker-pause 0s":    {Failures: 1},
	} {
		if err := o.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v", o, err)
		}
	}
}

// resolverPlugin receives wrappers of a resolver, as upstream's webhook plugins do.
type resolverPlugin struct {
	*admission.Handler
	webhookutil.AuthenticationInfoResolver
}

func (p *resolverPlugin) SetAuthenticationInfoResolverWrapper(w webhookutil.AuthenticationInfoResolverWrapper) {
	p.AuthenticationInfoResolver = w(p.AuthenticationInfoResolver)
}

func (p *resolverPlugin) ValidateInitialization() error { return nil }

// A call of a webhook passes upstream's transport, which makes its span, only once.
func TestUpstreamWrapsAWebhooksClientOnce(t *testing.T) {
	wraps := 0
	p := &resolverPlugin{AuthenticationInfoResolver: &webhookutil.AuthenticationInfoResolverDelegator{
		ClientConfigForServiceFunc: func(string, string, int) (*rest.Config, error) { return &rest.Config{}, nil },
	}}
	p.SetAuthenticationInfoResolverWrapper(func(r webhookutil.AuthenticationInfoResolver,
	) webhookutil.AuthenticationInfoResolver {
		return &webhookutil.AuthenticationInfoResolverDelegator{
			ClientConfigForServiceFunc: func(name, namespace string, port int) (*rest.Config, error) {
				c, err := r.ClientConfigForService(name, namespace, port)
				wraps++
				return c, err
			},
		}
	})
	all := &hooks{endpoints: map[string]*endpoint{}}
	all.configured.Store(&map[string]bool{})
	all.initializer().Initialize(p)
	c, err := p.ClientConfigForService("hook", "ns", 443)
	if err != nil || wraps != 1 {
		t.Fatalf("%d wrappers of upstream, %v", wraps, err)
	}
	h := &hook{code: http.StatusOK}
	c.Transport = h
	client, err := rest.HTTPClientFor(c)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Get(hookURL)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if h.called() != 1 || all.endpoints["hook.ns.svc:443/review"] == nil {
		t.Errorf("%d calls, and the endpoints are %v", h.called(), all.endpoints)
	}
}
