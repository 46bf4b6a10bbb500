package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// debugs returns clients of the debug addresses of a server's processes.
func debugs(t *testing.T, s *harness.Server) (all []*http.Client) {
	t.Helper()
	configs, err := filepath.Glob(filepath.Join(s.Dir, "config", "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range configs {
		if text, err := os.ReadFile(path); err == nil && bytes.Contains(text, []byte("debug-address: ")) {
			all = append(all, s.Debug(strings.TrimSuffix(filepath.Base(path), ".yaml")))
		}
	}
	if len(all) > 0 {
		return all
	}
	return []*http.Client{{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(s.Dir, "debug.sock"))
		},
	}}}
}

// stacks returns the goroutines of processes, counted by signature.
func stacks(processes []*http.Client) (map[string]int, error) {
	all := map[string]int{}
	for _, c := range processes {
		resp, err := c.Get("http://process/debug/pprof/goroutine?debug=2")
		if err != nil {
			return nil, err
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil {
			return nil, err
		}
		for _, g := range strings.Split(string(text), "\n\n") {
			all[signature(g)]++
		}
	}
	return all, nil
}

// signature names a goroutine by our functions on its stack, the outermost last. A library's functions count only for a
// goroutine without any of ours, and for the function that started it.
func signature(goroutine string) string {
	var functions []string
	for _, line := range strings.Split(goroutine, "\n")[1:] {
		if line == "" || line[0] == '\t' {
			continue
		}
		name := line
		if i := strings.LastIndexByte(line, '('); i > 0 && !strings.HasPrefix(line, "created by ") {
			name = line[:i]
		}
		name, _, _ = strings.Cut(name, " in goroutine ")
		functions = append(functions, name)
	}
	var relevant []string
	for i, f := range functions {
		if i >= len(functions)-2 || strings.Contains(f, "ServeHTTP") || strings.Contains(f, "watershed.dev/") {
			relevant = append(relevant, f)
		}
	}
	return strings.Join(relevant, " < ")
}

// pools are parts of the signatures of goroutines that serve no request: pools, idle connections and background work of
// clients. A goroutine that is also in the services' code does not count as one.
var pools = []string{
	"net/http.(*persistConn)", "http2.(*ClientConn).readLoop", "http2.(*clientConnReadLoop)",
	"net/http.(*Server).Serve", "http2.(*serverConn)", "google.golang.org/grpc", "net/http/pprof", "go.etcd.io/etcd/",
	"apiclient.(*Cluster)", "nats-server", "k8s.io/apimachinery/pkg/util/wait.(*Group)",
	"nats%2ego", "k8s.io/client-go/util/workqueue", "go.opentelemetry.io",
}

// ours are signatures of the services' own long-lived goroutines.
var ours = []string{
	"watershed.dev/services/gateway/server.(*workerPool).work < created by",
	"watershed.dev/services/gateway/server.serveHTTP2", "watershed.dev/services/gateway/h2writer.(*Conn)",
	"watershed.dev/platform/apiclient.(*Cluster)",
	"plugin/policy/mutating/patch.(*typeConverterManager).Run", // its first request may come after the samples
}

// lasts returns true if a goroutine belongs to no request.
func lasts(signature string) bool {
	in := func(parts []string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(signature, p) })
	}
	return !strings.Contains(signature, "ServeHTTP <") &&
		(in(ours) || in(pools) && !strings.Contains(signature, "watershed.dev/services/"))
}

// left returns the request goroutines of now that were not in before.
func left(before, now map[string]int) (all []string) {
	for s, n := range now {
		if n > before[s] && !lasts(s) {
			all = append(all, fmt.Sprintf("%d more of %s", n-before[s], s))
		}
	}
	return all
}

// costly is a request that its client cancels.
type costly struct {
	name, method, path, contentType, accept string
	headers                                 map[string]string
	body                                    []byte
	// comes: the client cancels when the request has reached the hanging server, instead of after a time.
	comes bool
	after time.Duration
	// library: a library call does most of the work, and cannot be cancelled (docs/operators/security.md).
	library bool
	// read is the number of bytes of the response that the client reads before it cancels.
	read int
}

// leftFor is how long a request's work may continue after its client left: 1 s, and 1 s to read the stacks.
const leftFor = 2 * time.Second

// leftForGood is the limit on a busy machine, or for a library call.
const leftForGood = 10 * time.Second

// TestARequestLeavesNothingRunning checks that a request has no goroutine left soon after its client cancels it. Each
// webhook, aggregated server, kubelet and pod that it waits for sees its own request cancelled. The same holds over
// HTTP/1.1 and HTTP/2, and in `up` and `split`.
func TestARequestLeavesNothingRunning(t *testing.T) {
	for name, start := range map[string]func(testing.TB, string, ...string) *harness.Server{
		"up":    harness.Up,
		"split": harness.Split,
	} {
		t.Run(name, func(t *testing.T) { leaving(t, start) })
	}
}

func leaving(t *testing.T, start func(testing.TB, string, ...string) *harness.Server) {
	dir := t.TempDir()
	h := newHanging(t)
	h.open.Store(true)
	s := start(t, "", "--enable-aggregator-routing", "--authorization-mode=Node,RBAC,Webhook",
		"--authentication-token-webhook-config-file="+h.kubeconfig(t, dir, "authn"),
		"--authorization-webhook-config-file="+h.kubeconfig(t, dir, "authz"))
	h.known(t, s)
	prepare(t, s, h)
	h.open.Store(false)
	gatewaysAreCounted(t, s)
	debug := debugs(t, s)
	before := map[string]int{}
	settle := func() {
		for range 10 {
			now, err := stacks(debug)
			if err != nil {
				t.Fatal(err)
			}
			for k, n := range now {
				before[k] = max(before[k], n)
			}
			time.Sleep(100 * time.Millisecond) // samples of goroutines that come and go on their own
		}
	}
	settle()
	for _, version := range []string{"HTTP/2", "HTTP/1.1"} {
		for _, c := range requests(t, h) {
			t.Run(version+" "+c.name, func(t *testing.T) {
				took, err := c.ends(t, s, h, version, debug, before)
				for n := 1; err != nil && n < 5; n++ { // a busy machine may be late, but not for each request
					t.Logf("once more: after %s: %v", took, err)
					took, err = c.ends(t, s, h, version, debug, before)
				}
				if err != nil {
					t.Fatalf("after %s: %v", took, err)
				}
				t.Logf("nothing is left after %s", took)
			})
		}
	}
}

// gatewaysAreCounted waits until each gateway of a split has counted the others. A gateway then starts a flow
// controller with a share of the seats, whose goroutines belong to no request.
func gatewaysAreCounted(t *testing.T, s *harness.Server) {
	t.Helper()
	logs, err := filepath.Glob(filepath.Join(s.Dir, "gateway-*.log"))
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, harness.Soon, func() error {
		for _, name := range logs {
			text, err := os.ReadFile(name)
			if err != nil || !strings.Contains(string(text), "The number of gateways changed") {
				return fmt.Errorf("%s has not counted the gateways (%v)", name, err)
			}
		}
		return nil
	})
}

// ends drops the request, and waits until none of its work is left. The error names the work that is left after
// leftFor. Work that is left after leftForGood fails the test.
func (c costly) ends(t *testing.T, s *harness.Server, h *hanging, version string, debug []*http.Client,
	before map[string]int) (took time.Duration, err error) {
	within := func(limit time.Duration) (took time.Duration, err error) {
		for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
			elapsed := time.Since(began) // the stacks are read after this time
			now, failed := stacks(debug)
			if failed != nil {
				t.Fatal(failed)
			}
			more := left(before, now)
			if n := h.waiting.Load(); n > 0 {
				more = append(more, fmt.Sprintf("%d requests wait at the other server", n))
			}
			if len(more) == 0 {
				return elapsed.Round(time.Millisecond), nil
			}
			if elapsed > limit {
				return elapsed.Round(time.Millisecond), errors.New(strings.Join(more, "\n"))
			}
		}
	}
	defer c.drop(t, s, h, version)()
	if c.library {
		return within(leftForGood)
	}
	if took, err = within(leftFor); err != nil {
		if _, stays := within(leftForGood); stays != nil {
			t.Fatalf("after %s: %v", leftForGood, stays)
		}
	}
	return took, err
}

// drop sends the request and cancels it. Over HTTP/2 its stream is reset, and the connection stays open until the
// caller calls closed.
func (c costly) drop(t *testing.T, s *harness.Server, h *hanging, version string) (closed func()) {
	conf, err := rest.TLSConfigFor(s.Config())
	if err != nil {
		t.Fatal(err)
	}
	var conns []net.Conn
	transport := &http.Transport{TLSClientConfig: conf}
	transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := s.Dialer()(ctx, network, address)
		conns = append(conns, conn)
		return conn, err
	}
	transport.Protocols = new(http.Protocols)
	if version == "HTTP/2" && c.headers["Upgrade"] == "" {
		transport.Protocols.SetHTTP2(true)
	} else {
		transport.Protocols.SetHTTP1(true)
	}
	if c.headers["Authorization"] != "" {
		transport.TLSClientConfig = &tls.Config{InsecureSkipVerify: true}
	}
	ctx, cancel := context.WithCancel(t.Context())
	req, err := http.NewRequestWithContext(ctx, c.method, s.Config().Host+c.path, bytes.NewReader(c.body))
	if err != nil {
		t.Fatal(err)
	}
	if c.contentType != "" {
		req.Header.Set("Content-Type", c.contentType)
	}
	if c.accept != "" {
		req.Header.Set("Accept", c.accept)
	}
	for k, v := range c.headers {
		req.Header.Set(k, v)
	}
	came := h.come.Load()
	var wg sync.WaitGroup
	answered := make(chan string, 1)
	wg.Go(func() {
		resp, err := harness.Retrying(transport).RoundTrip(req)
		if err != nil {
			answered <- ""
			return
		}
		defer resp.Body.Close()
		data, _ := io.ReadAll(io.LimitReader(resp.Body, int64(max(c.read, 300))))
		answered <- fmt.Sprintf("%s %s", resp.Status, data[:min(len(data), 300)])
		if resp.StatusCode < 300 {
			<-ctx.Done()
		}
	})
	if c.comes {
		harness.Eventually(t, harness.Soon, func() error {
			select {
			case text := <-answered:
				t.Fatalf("it was answered: %s", text)
			default:
			}
			if h.come.Load() == came {
				return fmt.Errorf("it has not come to the hanging server")
			}
			return nil
		})
	} else {
		time.Sleep(c.after) // the client cancels while the server works
		// A response is no failure here. Watches begin to respond at once. The machine decides whether a list, a
		// document or discovery takes longer than this, and these requests involve no server that hangs.
		select {
		case text := <-answered:
			t.Logf("it was answered: %.60s", text)
		default:
		}
	}
	cancel()
	closed = func() {
		for _, c := range conns {
			if c != nil {
				_ = c.Close()
			}
		}
	}
	if transport.Protocols.HTTP1() { // an upgraded connection does not end with its context
		closed()
	}
	wg.Wait()
	return closed
}

// The informer of a policy's parameters ends with the process, which would wait for it for 30 s.
func TestAPolicyWithParametersDoesNotDelayTheStop(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	s.Apply(`apiVersion: v1
kind: ConfigMap
metadata: {name: refused, namespace: default}
data: {name: refused}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: refused}
spec:
  paramKind: {apiVersion: v1, kind: ConfigMap}
  matchConstraints:
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [namespaces]}]
  validations: [{expression: object.metadata.name != params.data.name}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: refused}
spec:
  policyName: refused
  validationActions: [Deny]
  paramRef: {name: refused, namespace: default, parameterNotFoundAction: Deny}
`)
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl("", "create", "namespace", "refused", "--dry-run=server")
		if err == nil || !strings.Contains(out, "object.metadata.name != params.data.name") {
			return fmt.Errorf("got %q (%v)", out, err)
		}
		return nil
	})
	s.StopWithin(28 * time.Second) // less than lifecycle.StopTimeout, for which the process would wait
}
