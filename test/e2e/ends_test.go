package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// hanging is an HTTPS server that answers no request below /hang and counts the requests that wait. It plays the
// webhooks, the aggregated server, the kubelet, the pod and the service.
type hanging struct {
	*httptest.Server
	certificate   atomic.Pointer[tls.Certificate]
	come, waiting atomic.Int64
	// open: requests are answered at once, as a sound server would.
	open atomic.Bool
}

func newHanging(t *testing.T) *hanging {
	h := &hanging{}
	h.Server = httptest.NewUnstartedServer(h)
	l, err := net.Listen("tcp", "0.0.0.0:0") // endpoints and nodes may not have loopback addresses
	if err != nil {
		t.Fatal(err)
	}
	h.Listener = l
	h.EnableHTTP2 = true
	h.TLS = &tls.Config{GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
		conf := &tls.Config{NextProtos: []string{"h2", "http/1.1"}, ClientAuth: tls.RequestClientCert}
		if c := h.certificate.Load(); c != nil {
			conf.Certificates = []tls.Certificate{*c}
		} else {
			conf.Certificates = h.TLS.Certificates
		}
		return conf, nil
	}}
	h.StartTLS()
	t.Cleanup(func() { h.CloseClientConnections(); h.Close() })
	return h
}

// known gives the server a certificate that a cluster trusts.
func (h *hanging) known(t *testing.T, s *harness.Server) {
	cert, err := tls.LoadX509KeyPair(s.ServingCertificate("hanging", "127.0.0.1", harness.HostAddress(t)))
	if err != nil {
		t.Fatal(err)
	}
	h.certificate.Store(&cert)
}

// port is the server's port.
func (h *hanging) port() string {
	_, port, _ := net.SplitHostPort(h.Listener.Addr().String())
	return port
}

// webhook is a webhook's clientConfig.
func (h *hanging) webhook(t *testing.T, s *harness.Server, path string) string {
	ca, err := os.ReadFile(s.CA + ".crt")
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{url: "https://127.0.0.1:%s/%s", caBundle: %s}`, h.port(), path,
		base64.StdEncoding.EncodeToString(ca))
}

// ServeHTTP implements http.Handler.
func (h *hanging) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	body, _ := io.ReadAll(req.Body)
	if req.URL.Path == "/apis/hang.example.com/v1" && req.Header.Get("X-Remote-Group") == "system:masters" ||
		strings.HasPrefix(req.URL.Path, "/openapi") || req.URL.Path == "/apis" {
		fmt.Fprint(w, `{"kind":"APIResourceList","apiVersion":"v1","groupVersion":"hang.example.com/v1","resources":[`+
			`{"name":"things","singularName":"thing","namespaced":false,"kind":"Thing","verbs":["get","list"]}]}`)
		return
	}
	aboutOthers := req.URL.Path == "/authz" && !bytes.Contains(body, []byte(`"user":"hanging-`))
	if h.open.Load() || aboutOthers {
		h.answer(w, req, body)
		return
	}
	h.come.Add(1)
	h.waiting.Add(1)
	defer h.waiting.Add(-1)
	<-req.Context().Done()
}

// answer answers a conversion, which is the one question that the test asks in earnest.
func (h *hanging) answer(w http.ResponseWriter, _ *http.Request, body []byte) {
	var review struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Request    struct {
			UID               string           `json:"uid"`
			DesiredAPIVersion string           `json:"desiredAPIVersion"`
			Objects           []map[string]any `json:"objects"`
		} `json:"request"`
	}
	if err := json.Unmarshal(body, &review); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	for _, o := range review.Request.Objects {
		o["apiVersion"] = review.Request.DesiredAPIVersion
	}
	_ = json.NewEncoder(w).Encode(map[string]any{
		"apiVersion": review.APIVersion, "kind": review.Kind,
		"response": map[string]any{
			"uid": review.Request.UID, "allowed": true, "result": map[string]any{"status": "Success"},
			"convertedObjects": review.Request.Objects,
		},
	})
}

// kubeconfig is a webhook's configuration file.
func (h *hanging) kubeconfig(t *testing.T, dir, name string) string {
	path := filepath.Join(dir, name+".kubeconfig")
	text := fmt.Sprintf(`{apiVersion: v1, kind: Config, current-context: x, clusters: [{name: c, cluster: {`+
		`server: "https://127.0.0.1:%s/%s", insecure-skip-tls-verify: true}}], users: [{name: u}], `+
		`contexts: [{name: x, context: {cluster: c, user: u}}]}`, h.port(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// debugs are clients of the debug addresses of a server's processes.
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

// stacks are the goroutines of processes, counted by the functions that they are in. Functions of libraries count only
// for a goroutine that is in none of ours, and for what began it.
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

// signature names a goroutine by its functions, the outermost one last.
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
	var kept []string
	for i, f := range functions {
		if i >= len(functions)-2 || strings.Contains(f, "ServeHTTP") || strings.Contains(f, "watershed.dev/") {
			kept = append(kept, f)
		}
	}
	return strings.Join(kept, " < ")
}

// pools are parts of the signatures of goroutines that serve no request while they are in none of the services' code:
// pools, connections that are kept, and clients' background work.
var pools = []string{
	"net/http.(*persistConn)", "http2.(*ClientConn).readLoop", "http2.(*clientConnReadLoop)",
	"net/http.(*Server).Serve", "http2.(*serverConn)", "google.golang.org/grpc", "net/http/pprof", "go.etcd.io/etcd/",
	"apiclient.(*Cluster)", "nats-server", "k8s.io/apimachinery/pkg/util/wait.(*Group)", "nats.go", "k8s.io/client-go/util/workqueue", "go.opentelemetry.io",
}

// ours are those that the services have themselves.
var ours = []string{
	"watershed.dev/services/gateway/edge.(*workers).work < created by",
	"watershed.dev/services/gateway/edge.shareConnections", "watershed.dev/services/gateway/wire.(*Conn)",
	"watershed.dev/platform/apiclient.(*Cluster)",
}

// lasts says whether a goroutine belongs to no request.
func lasts(signature string) bool {
	in := func(parts []string) bool {
		return slices.ContainsFunc(parts, func(p string) bool { return strings.Contains(signature, p) })
	}
	return !strings.Contains(signature, "ServeHTTP <") &&
		(in(ours) || in(pools) && !strings.Contains(signature, "watershed.dev/services/"))
}

// left are the goroutines that are there beside those of before.
func left(before, now map[string]int) (all []string) {
	for s, n := range now {
		if n > before[s] && !lasts(s) {
			all = append(all, fmt.Sprintf("%d more of %s", n-before[s], s))
		}
	}
	return all
}

// costly is a request that is given up.
type costly struct {
	name, method, path, contentType, accept string
	headers                                 map[string]string
	body                                    []byte
	// comes: the request is given up once it has reached the hanging server, rather than after a while.
	comes bool
	after time.Duration
	// read is how many bytes of the answer are read before that.
	read int
}

// leftFor is how long a machine that has much to do may take to end what a client left; it should be a second.
const leftFor = 10 * time.Second

// A request whose client leaves has no goroutine anywhere a moment later, and whatever it waited for has its own request
// cancelled: webhooks, aggregated servers, kubelets, pods. So it is over HTTP/1.1 and HTTP/2, and in both forms.
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
			time.Sleep(100 * time.Millisecond) // samples of what comes and goes by itself
		}
	}
	settle()
	for _, version := range []string{"HTTP/2", "HTTP/1.1"} {
		for _, c := range requests(t, h) {
			t.Run(version+" "+c.name, func(t *testing.T) {
				defer c.drop(t, s, h, version)()
				gone := time.Now()
				harness.Eventually(t, leftFor, func() error {
					now, err := stacks(debug)
					if err != nil {
						return err
					}
					if more := left(before, now); len(more) > 0 {
						return fmt.Errorf("%s", strings.Join(more, "\n"))
					}
					if n := h.waiting.Load(); n > 0 {
						return fmt.Errorf("%d requests wait at the other server", n)
					}
					return nil
				})
				t.Logf("nothing is left after %s", time.Since(gone).Round(time.Millisecond))
			})
		}
	}
}

// drop sends the request and gives it up. Over HTTP/2 its stream is reset and the connection stays until closed is called.
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
		resp, err := transport.RoundTrip(req)
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
		harness.Eventually(t, 10*time.Second, func() error {
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
		time.Sleep(c.after) // the client gives up in the midst of the work
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
	if transport.Protocols.HTTP1() { // one that was upgraded does not end with its context
		closed()
	}
	wg.Wait()
	return closed
}

// many is how many ConfigMaps are listed, and doomed how many are deleted together.
const many, doomed = 5000, 2000

// prepare makes what the requests are for.
func prepare(t *testing.T, s *harness.Server, h *hanging) {
	address := harness.HostAddress(t)
	hook := func(kind, phase, namespace string) string {
		return fmt.Sprintf(`---
apiVersion: admissionregistration.k8s.io/v1
kind: %sWebhookConfiguration
metadata: {name: hang-%s}
webhooks:
- name: hang.example.com
  clientConfig: %s
  admissionReviewVersions: [v1]
  sideEffects: None
  timeoutSeconds: 30
  failurePolicy: Fail
  namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: %s}}
  rules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE, UPDATE, DELETE, CONNECT], resources: [configmaps, services/proxy]}]
`, kind, phase, h.webhook(t, s, phase), namespace)
	}
	s.Kubectl("create", "serviceaccount", "default")
	s.Apply(fmt.Sprintf(`
apiVersion: v1
kind: Namespace
metadata: {name: mutating}
---
apiVersion: v1
kind: Namespace
metadata: {name: validating}
---
apiVersion: v1
kind: Namespace
metadata: {name: many}
---
apiVersion: v1
kind: Namespace
metadata: {name: doomed}
---
apiVersion: v1
kind: Namespace
metadata: {name: policy}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: there, namespace: mutating}
---
apiVersion: v1
kind: ConfigMap
metadata: {name: there, namespace: validating}
---
apiVersion: v1
kind: Node
metadata: {name: node}
---
apiVersion: v1
kind: Pod
metadata: {name: p}
spec: {automountServiceAccountToken: false, nodeName: node, containers: [{name: c, image: x, ports: [{containerPort: %[2]s}]}]}
---
apiVersion: v1
kind: Service
metadata: {name: s}
spec: {ports: [{port: 443, targetPort: %[2]s}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: s-1, labels: {kubernetes.io/service-name: s}}
addressType: IPv4
ports: [{name: "", port: %[2]s, protocol: TCP}]
endpoints: [{addresses: [%[1]q], conditions: {ready: true}}]
---
apiVersion: v1
kind: Endpoints
metadata: {name: s}
subsets: [{addresses: [{ip: %[1]q, targetRef: {kind: Pod, namespace: default, name: p}}], ports: [{port: %[2]s}]}]
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.hang.example.com}
spec: {insecureSkipTLSVerify: true, group: hang.example.com, groupPriorityMinimum: 1000, versionPriority: 15, service: {name: s, namespace: default}, version: v1}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicy
metadata: {name: costly}
spec:
  failurePolicy: Fail
  matchConstraints:
    namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: policy}}
    resourceRules: [{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]
  validations: [{expression: "object.data.all(k, object.data.all(l, k != l + 'x'))"}]
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingAdmissionPolicyBinding
metadata: {name: costly}
spec: {policyName: costly, validationActions: [Deny]}
`, address, h.port()))
	for _, patch := range [][]string{
		{"node", "node", fmt.Sprintf(`{"status":{"addresses":[{"type":"InternalIP","address":%q}],`+
			`"daemonEndpoints":{"kubeletEndpoint":{"Port":%s}}}}`, address, h.port())},
		{"pod", "p", fmt.Sprintf(`{"status":{"phase":"Running","podIP":%q,"podIPs":[{"ip":%q}]}}`, address, address)},
	} {
		s.Kubectl("patch", patch[0], patch[1], "--subresource=status", "--type=merge", "-p", patch[2])
	}
	define(t, s, widgetsDefinition(fmt.Sprintf(`{strategy: Webhook, webhook: {conversionReviewVersions: [v1],`+
		` clientConfig: %s}}`, h.webhook(t, s, "convert"))))
	for i := range 3 {
		s.Apply(fmt.Sprintf(`{apiVersion: e2e.example.com/v1, kind: Widget, metadata: {name: w%d}, spec: {hostPort: a}}`, i))
	}
	var wg sync.WaitGroup
	create := s.Client().CoreV1()
	for w := range 16 {
		wg.Go(func() {
			for i := w; i < many; i += 16 {
				namespace := "many"
				if i < doomed {
					namespace = "doomed"
				}
				_, err := create.ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
					ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("c-%d", i)},
					Data:       map[string]string{"a": strings.Repeat("x", 500)},
				}, metav1.CreateOptions{})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	s.Apply(hook("Mutating", "mutate", "mutating") + hook("Validating", "validate", "validating"))
	harness.Eventually(t, 30*time.Second, func() error {
		out, err := s.TryKubectl("", "get", "apiservice", "v1.hang.example.com", "-o",
			`jsonpath={.status.conditions[?(@.type=="Available")].status}`)
		if err != nil || out != "True" {
			return fmt.Errorf("%v: available is %q", err, out)
		}
		return nil
	})
}

// requests are the kinds of costly requests.
func requests(t *testing.T, h *hanging) []costly {
	const (
		yaml     = "application/yaml"
		asJSON   = "application/json"
		table    = "application/json;as=Table;v=v1;g=meta.k8s.io"
		widgets2 = "/apis/e2e.example.com/v2/namespaces/default/widgets"
		cms      = "/api/v1/configmaps"
		pod      = "/api/v1/namespaces/default/pods/p"
	)
	cm := func(name string) []byte {
		return []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"` + name + `"}}`)
	}
	data := map[string]string{}
	for i := range 3000 {
		data[fmt.Sprintf("key-%d", i)] = "v"
	}
	costlyCM, err := json.Marshal(&corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Name: "costly"}, Data: data,
	})
	if err != nil {
		t.Fatal(err)
	}
	socket := map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
		"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "v5.channel.k8s.io"}
	tunnel := map[string]string{"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13",
		"Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Protocol": "SPDY/3.1+portforward.k8s.io"}
	spdy := map[string]string{"Connection": "Upgrade", "Upgrade": "SPDY/3.1", "X-Stream-Protocol-Version": "v4.channel.k8s.io"}
	short := 100 * time.Millisecond
	var terms []string
	for i := range 10000 {
		terms = append(terms, fmt.Sprintf("l%d!=x", i))
	}
	return []costly{
		{name: "create, mutating webhook", method: "POST", path: "/api/v1/namespaces/mutating/configmaps", contentType: asJSON, body: cm("new"), comes: true},
		{name: "create, validating webhook", method: "POST", path: "/api/v1/namespaces/validating/configmaps", contentType: asJSON, body: cm("new"), comes: true},
		{name: "merge patch", method: "PATCH", path: "/api/v1/namespaces/mutating/configmaps/there", contentType: "application/merge-patch+json", body: []byte(`{"data":{"a":"b"}}`), comes: true},
		{name: "apply", method: "PATCH", path: "/api/v1/namespaces/mutating/configmaps/there?fieldManager=m", contentType: "application/apply-patch+yaml", body: cm("there"), comes: true},
		{name: "delete", method: "DELETE", path: "/api/v1/namespaces/validating/configmaps/there", comes: true},
		{name: "delete, collection and webhook", method: "DELETE", path: "/api/v1/namespaces/validating/configmaps", comes: true},
		{name: "list in another version", method: "GET", path: widgets2, comes: true},
		{name: "get in another version", method: "GET", path: widgets2 + "/w0", comes: true},
		{name: "table in another version", method: "GET", path: widgets2, accept: table, comes: true},
		{name: "create in another version", method: "POST", path: widgets2, contentType: asJSON, body: []byte(`{"apiVersion":"e2e.example.com/v2","kind":"Widget","metadata":{"name":"new"}}`), comes: true},
		{name: "patch in another version", method: "PATCH", path: widgets2 + "/w0", contentType: "application/merge-patch+json", body: []byte(`{"spec":{"replicas":2}}`), comes: true},
		{name: "watch in another version", method: "GET", path: widgets2 + "?watch=1", comes: true},
		{name: "watch in another version with selector", method: "GET", path: widgets2 + "?watch=1&fieldSelector=spec.host%3Da", comes: true},
		{name: "list as Table", method: "GET", path: cms, accept: table, after: short},
		{name: "list as Table from etcd", method: "GET", path: cms + "?resourceVersion=1&resourceVersionMatch=NotOlderThan&limit=0&pretty=true", accept: table, after: short},
		{name: "list as YAML", method: "GET", path: cms, accept: yaml, after: short},
		{name: "list compressed", method: "GET", path: cms, headers: map[string]string{"Accept-Encoding": "gzip"}, after: short},
		{name: "list with a long selector", method: "GET", path: cms + "?labelSelector=" + strings.Join(terms, ","), after: short},
		{name: "list with a long selector from etcd", method: "GET", path: cms + "?pretty=true&labelSelector=" + strings.Join(terms, ","), after: short},
		{name: "policy near its budget", method: "POST", path: "/api/v1/namespaces/policy/configmaps", contentType: asJSON, body: costlyCM, after: short},
		{name: "watch with initial events", method: "GET", path: cms + "?watch=1", after: short},
		{name: "watch-list", method: "GET", path: cms + "?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true", after: short},
		{name: "watch Table", method: "GET", path: cms + "?watch=1", accept: table, after: short},
		{name: "watch with a long selector", method: "GET", path: cms + "?watch=1&labelSelector=" + strings.Join(terms, ","), after: short},
		{name: "aggregated server", method: "GET", path: "/apis/hang.example.com/v1/things", comes: true},
		{name: "aggregated watch", method: "GET", path: "/apis/hang.example.com/v1/things?watch=1", comes: true},
		{name: "aggregated upgrade", method: "GET", path: "/apis/hang.example.com/v1/things/x/exec", headers: socket, comes: true},
		{name: "service proxy", method: "GET", path: "/api/v1/namespaces/default/services/https:s:443/proxy/x", comes: true},
		{name: "service proxy, upgrade", method: "GET", path: "/api/v1/namespaces/default/services/https:s:443/proxy/x", headers: socket, comes: true},
		{name: "pod proxy", method: "GET", path: "/api/v1/namespaces/default/pods/https:p:" + h.port() + "/proxy/x", comes: true},
		{name: "node proxy", method: "GET", path: "/api/v1/nodes/node/proxy/x", comes: true},
		{name: "exec, SPDY", method: "POST", path: pod + "/exec?command=x&stdout=1", headers: spdy, comes: true},
		{name: "exec, WebSocket", method: "GET", path: pod + "/exec?command=x&stdout=1", headers: socket, comes: true},
		{name: "attach, SPDY", method: "POST", path: pod + "/attach?stdout=1", headers: spdy, comes: true},
		{name: "port-forward, SPDY", method: "POST", path: pod + "/portforward", headers: spdy, comes: true},
		{name: "port-forward, WebSocket", method: "GET", path: pod + "/portforward", headers: tunnel, comes: true},
		{name: "log", method: "GET", path: pod + "/log?follow=true", comes: true},
		{name: "SubjectAccessReview", method: "POST", path: "/apis/authorization.k8s.io/v1/subjectaccessreviews", contentType: asJSON, comes: true,
			body: []byte(`{"apiVersion":"authorization.k8s.io/v1","kind":"SubjectAccessReview","spec":{"user":"hanging-bob","resourceAttributes":{"verb":"get","resource":"pods"}}}`)},
		{name: "authorization", method: "GET", path: "/api/v1/pods", headers: map[string]string{"Impersonate-User": "hanging-eve"}, comes: true},
		{name: "TokenReview", method: "POST", path: "/apis/authentication.k8s.io/v1/tokenreviews", contentType: asJSON, comes: true,
			body: []byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenReview","spec":{"token":"unknown"}}`)},
		{name: "authentication", method: "GET", path: "/api/v1/pods", headers: map[string]string{"Authorization": "Bearer another"}, comes: true},
		{name: "OpenAPI v2", method: "GET", path: "/openapi/v2", after: 20 * time.Millisecond},
		{name: "OpenAPI v3", method: "GET", path: "/openapi/v3/apis/apps/v1", after: 5 * time.Millisecond},
		{name: "discovery", method: "GET", path: "/apis", accept: "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList", after: 5 * time.Millisecond},
		{name: "delete collection", method: "DELETE", path: "/api/v1/namespaces/doomed/configmaps", after: short},
	}
}
