package e2e

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"maps"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// beyond is the network outside of the control plane: one server that plays every remote host. Its host names do not
// resolve on this machine, so clients reach it only through a proxy.
type beyond struct {
	*httptest.Server
	ca string // PEM
}

func newBeyond(t *testing.T) *beyond {
	b := &beyond{Server: httptest.NewUnstartedServer(http.HandlerFunc(answerBeyond))}
	b.Config.ErrorLog = log.New(io.Discard, "", 0)
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	self := &x509.Certificate{
		SerialNumber: big.NewInt(1),
		NotAfter:     time.Now().Add(time.Hour),
		DNSNames:     []string{"*.example.com", "*.default.svc"},
	}
	der, err := x509.CreateCertificate(rand.Reader, self, self, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	b.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	b.StartTLS()
	t.Cleanup(b.Close)
	b.ca = string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}))
	return b
}

// answerBeyond responds as an issuer, a kubelet and every webhook.
func answerBeyond(w http.ResponseWriter, req *http.Request) {
	var review map[string]any
	_ = json.NewDecoder(req.Body).Decode(&review)
	w.Header().Set("Content-Type", "application/json")
	answer := func(values map[string]any) { _ = json.NewEncoder(w).Encode(values) }
	switch name, _, _ := strings.Cut(req.Host, "."); name { // a Service by its DNS name
	case "issuer", "second":
		answer(map[string]any{"issuer": "https://" + req.Host, "jwks_uri": "https://" + req.Host + "/keys"})
	case "tokens":
		review["status"] = map[string]any{"authenticated": true, "user": map[string]any{"username": "from-beyond"}}
		answer(review)
	case "rights":
		review["status"] = map[string]any{"allowed": true}
		answer(review)
	case "hook":
		request, _ := review["request"].(map[string]any)
		review["response"] = map[string]any{
			"uid":     request["uid"],
			"allowed": false,
			"status":  map[string]any{"message": "hook says no"},
		}
		answer(review)
	case "aggregated":
		answer(map[string]any{"kind": "Things", "path": req.URL.Path})
	case "converter":
		request, _ := review["request"].(map[string]any)
		objects, _ := request["objects"].([]any)
		for _, o := range objects {
			o.(map[string]any)["apiVersion"] = request["desiredAPIVersion"]
		}
		review["response"] = map[string]any{
			"uid":              request["uid"],
			"convertedObjects": objects,
			"result":           map[string]any{"status": "Success"},
		}
		answer(review)
	case "node":
		w.Header().Set("Content-Type", "text/plain")
		fmt.Fprintln(w, "a line of a log")
	}
}

// proxy is an HTTP CONNECT proxy on a Unix socket that accepts every host name, as konnectivity's does.
type proxy struct {
	socket    string
	mu        sync.Mutex
	requested map[string]bool
}

// newProxy starts a proxy that connects every request to one server.
func newProxy(t *testing.T, dir, name, to string) *proxy {
	p := &proxy{socket: filepath.Join(dir, name), requested: map[string]bool{}}
	l, err := net.Listen("unix", p.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go p.serve(c, to)
		}
	}()
	return p
}

func (p *proxy) serve(c net.Conn, to string) {
	defer c.Close()
	r := bufio.NewReader(c)
	req, err := http.ReadRequest(r)
	if err != nil || req.Method != http.MethodConnect {
		return
	}
	p.mu.Lock()
	p.requested[req.Host] = true
	p.mu.Unlock()
	out, err := net.Dial("tcp", to)
	if err != nil {
		fmt.Fprint(c, "HTTP/1.1 502 Bad Gateway\r\n\r\n")
		return
	}
	defer out.Close()
	fmt.Fprint(c, "HTTP/1.1 200 Connection established\r\n\r\n")
	go func() { _, _ = io.Copy(out, r); out.Close() }()
	_, _ = io.Copy(c, out)
}

// names returns the host names that clients requested.
func (p *proxy) names() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.requested))
}

// egress writes an EgressSelectorConfiguration that sends networks through proxies on this host.
func egress(t *testing.T, file string, by map[string]*proxy) {
	t.Helper()
	type object = map[string]any
	var all []object
	for _, network := range slices.Sorted(maps.Keys(by)) {
		all = append(all, object{"name": network, "connection": object{
			"proxyProtocol": "HTTPConnect",
			"transport":     object{"uds": object{"udsName": by[network].socket}},
		}})
	}
	text, err := json.Marshal(object{
		"apiVersion":       "apiserver.k8s.io/v1beta1",
		"kind":             "EgressSelectorConfiguration",
		"egressSelections": all,
	})
	if err == nil {
		err = os.WriteFile(file, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

const beyondIssuers = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
jwt:
- issuer: {url: "https://issuer.example.com", certificateAuthority: %[1]q, audiences: [x], egressSelectorType: cluster}
  claimMappings: {username: {claim: sub, prefix: ""}}
- issuer: {url: "https://second.example.com", certificateAuthority: %[1]q, audiences: [x],
    egressSelectorType: controlplane}
  claimMappings: {username: {claim: sub, prefix: ""}}
`

// TestEgressGoesByItsProxies checks that outbound connections use only the proxy of their network, as in
// kube-apiserver.
func TestEgressGoesByItsProxies(t *testing.T) {
	t.Parallel()
	dir, b := harness.TempDir(t), newBeyond(t)
	proxies := map[string]map[string]*proxy{}
	for _, side := range []string{"kube-apiserver", "watershed"} {
		proxies[side] = map[string]*proxy{}
		for _, network := range []string{"cluster", "controlplane"} {
			proxies[side][network] = newProxy(t, dir, side+network, b.Listener.Addr().String())
		}
		egress(t, filepath.Join(dir, side), proxies[side])
	}
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ca := base64.StdEncoding.EncodeToString([]byte(b.ca))
	webhook := func(name string) string {
		return file(name, fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"x",
"clusters":[{"name":"c","cluster":{"server":"https://%s.example.com","certificate-authority-data":%q}}],
"users":[{"name":"u"}],"contexts":[{"name":"x","context":{"cluster":"c","user":"u"}}]}`, name, ca))
	}
	theirs, ours := harness.Twins(t,
		"--egress-selector-config-file="+filepath.Join(dir, harness.Side),
		"--authentication-config="+file("issuers", fmt.Sprintf(beyondIssuers, b.ca)),
		"--authentication-token-webhook-config-file="+webhook("tokens"),
		"--authentication-token-webhook-version=v1",
		"--authorization-mode=Node,RBAC,Webhook",
		"--authorization-webhook-config-file="+webhook("rights"),
		"--authorization-webhook-version=v1",
		"--audit-policy-file="+auditPolicy(t, dir, "Metadata"),
		"--audit-webhook-config-file="+webhook("records"),
		"--audit-webhook-batch-max-wait=100ms",
		"--tracing-config-file="+file("tracing", `{"apiVersion":"apiserver.config.k8s.io/v1",
"kind":"TracingConfiguration","endpoint":"127.0.0.1:1","samplingRatePerMillion":1000000}`),
	)
	seen := func(side string) (all []string) {
		for _, network := range []string{"cluster", "controlplane"} {
			for _, name := range proxies[side][network].names() {
				all = append(all, network+" "+name)
			}
		}
		return all
	}
	want := []string{
		"cluster aggregated.example.com:443",
		"cluster converter.example.com:443",
		"cluster issuer.example.com:443",
		"cluster node.example.com:10250",
		"cluster service.example.com:443",
		"controlplane 127.0.0.1:1",
		"controlplane hook.example.com:443",
		"controlplane records.example.com:443",
		"controlplane rights.example.com:443",
		"controlplane second.example.com:443",
		"controlplane tokens.example.com:443",
	}
	for side, s := range map[string]*harness.Server{"kube-apiserver": theirs, "watershed": ours} {
		t.Run(side, func(t *testing.T) {
			s.Apply(fmt.Sprintf(beyondObjects, ca))
			s.Kubectl("patch", "node", "node", "--subresource=status", "--type=merge", "-p", `{"status":{"addresses":`+
				`[{"type":"Hostname","address":"node.example.com"}],`+
				`"daemonEndpoints":{"kubeletEndpoint":{"Port":10250}}}}`)
			harness.Eventually(t, harness.Soon, func() error {
				out, err := s.TryKubectl("", "logs", "p")
				if err != nil || out != "a line of a log\n" {
					return fmt.Errorf("logs: %v %s", err, out)
				}
				bearer := rest.AnonymousClientConfig(s.Config())
				bearer.BearerToken = "one"
				client := kubernetes.NewForConfigOrDie(bearer)
				me, err := client.AuthenticationV1().SelfSubjectReviews().Create(t.Context(),
					&authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
				if err != nil || me.Status.UserInfo.Username != "from-beyond" {
					return fmt.Errorf("the token's user: %w, %v", err, me)
				}
				if _, err := client.CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{}); err != nil {
					return fmt.Errorf("a request that the webhook allows: %w", err)
				}
				for _, object := range []string{"configmap", "secret generic"} { // by URL, and by a Service
					args := append([]string{"create"}, strings.Fields(object)...)
					out, err := s.TryKubectl("", append(args, "refused")...)
					if err == nil || !strings.Contains(out, "hook says no") {
						return fmt.Errorf("a new %s: %s", object, out)
					}
				}
				if out, err := s.TryKubectl(`{apiVersion: beyond.example.com/v1, kind: Thing, metadata: {name: t}}`,
					"apply", "-f", "-"); err != nil {
					return fmt.Errorf("a converted object: %s", out)
				}
				const path = "/apis/aggregated.example.com/v1/things"
				if out, err := s.TryKubectl("", "get", "--raw", path); err != nil || !strings.Contains(out, path) {
					return fmt.Errorf("the aggregated server's response: %v %s", err, out)
				}
				if got := seen(side); !slices.Equal(got, want) {
					return fmt.Errorf("the proxies saw\n%s\nwant\n%s", strings.Join(got, "\n"),
						strings.Join(want, "\n"))
				}
				return nil
			})
		})
	}
}

// beyondObjects are objects that make the server call remote hosts.
const beyondObjects = `
apiVersion: v1
kind: ServiceAccount
metadata: {name: default}
---
apiVersion: v1
kind: Node
metadata: {name: node}
---
apiVersion: v1
kind: Pod
metadata: {name: p}
spec: {automountServiceAccountToken: false, nodeName: node, containers: [{name: c, image: x}]}
---
apiVersion: v1
kind: Service
metadata: {name: aggregated}
spec: {type: ExternalName, externalName: aggregated.example.com}
---
apiVersion: v1
kind: Service
metadata: {name: hook}
spec: {type: ExternalName, externalName: service.example.com}
---
apiVersion: v1
kind: Service
metadata: {name: converter}
spec: {type: ExternalName, externalName: converter.example.com}
---
apiVersion: apiregistration.k8s.io/v1
kind: APIService
metadata: {name: v1.aggregated.example.com}
spec: {insecureSkipTLSVerify: true, group: aggregated.example.com, groupPriorityMinimum: 1000, versionPriority: 15, service: {name: aggregated, namespace: default}, version: v1}
---
apiVersion: admissionregistration.k8s.io/v1
kind: ValidatingWebhookConfiguration
metadata: {name: beyond}
webhooks:
- name: url.example.com
  clientConfig: {url: "https://hook.example.com", caBundle: %[1]s}
  rules: [{apiGroups: [""], apiVersions: [v1], resources: [configmaps], operations: [CREATE]}]
  admissionReviewVersions: [v1]
  sideEffects: None
  matchConditions: [{name: ours, expression: "object.metadata.name == 'refused'"}]
- name: service.example.com
  clientConfig: {service: {name: hook, namespace: default}, caBundle: %[1]s}
  rules: [{apiGroups: [""], apiVersions: [v1], resources: [secrets], operations: [CREATE]}]
  admissionReviewVersions: [v1]
  sideEffects: None
  matchConditions: [{name: ours, expression: "object.metadata.name == 'refused'"}]
---
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.beyond.example.com}
spec:
  group: beyond.example.com
  scope: Namespaced
  names: {plural: things, singular: thing, kind: Thing}
  conversion:
    strategy: Webhook
    webhook:
      conversionReviewVersions: [v1]
      clientConfig: {service: {name: converter, namespace: default}, caBundle: %[1]s}
  versions:
  - {name: v1, served: true, storage: false, schema: {openAPIV3Schema: {type: object}}}
  - {name: v2, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
`

// TestEtcdIsReachedByItsProxy checks that etcd is reached only through the proxy of its own network.
func TestEtcdIsReachedByItsProxy(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	etcd := harness.Etcd(t, dir)
	u, err := url.Parse(etcd)
	if err != nil {
		t.Fatal(err)
	}
	by := newProxy(t, dir, "proxy", u.Host)
	egress(t, filepath.Join(dir, "egress"), map[string]*proxy{"etcd": by})
	s := harness.Up(t, "", "--etcd-servers=http://etcd.example.com:2379",
		"--egress-selector-config-file="+filepath.Join(dir, "egress"))
	s.Kubectl("create", "configmap", "written")
	if got := by.names(); !slices.Equal(got, []string{"etcd.example.com:2379"}) {
		t.Errorf("the proxy of etcd saw %v", got)
	}
}
