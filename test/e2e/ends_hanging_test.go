package e2e

import (
	"bytes"
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
	"strings"
	"sync/atomic"
	"testing"

	"watershed.dev/test/harness"
)

// hanging is an HTTPS server that never responds to requests below /hang, and counts them while they wait. It plays the
// webhooks, the aggregated server, the kubelet, the pod and the service.
type hanging struct {
	*httptest.Server
	certificate   atomic.Pointer[tls.Certificate]
	come, waiting atomic.Int64
	// open makes the server respond to every request at once, as a healthy server would.
	open atomic.Bool
}

func newHanging(t *testing.T) *hanging {
	h := &hanging{}
	h.Server = httptest.NewUnstartedServer(h)
	l, err := net.Listen("tcp", "0.0.0.0:0") // endpoints and nodes cannot have loopback addresses
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

// known gives the server a certificate that the cluster's CA signed.
func (h *hanging) known(t *testing.T, s *harness.Server) {
	cert, err := tls.LoadX509KeyPair(s.ServingCertificate("hanging", "127.0.0.1", harness.HostAddress(t)))
	if err != nil {
		t.Fatal(err)
	}
	h.certificate.Store(&cert)
}

// port returns the server's port.
func (h *hanging) port() string {
	_, port, _ := net.SplitHostPort(h.Listener.Addr().String())
	return port
}

// webhook returns a webhook's clientConfig.
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
	if req.URL.Path == "/apis/hang.example.com/v1" && req.Header.Get("X-Remote-User") == "system:kube-aggregator" ||
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

// answer responds to a conversion review. No other review's content matters to the test.
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

// kubeconfig writes a webhook's kubeconfig file and returns its path.
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
