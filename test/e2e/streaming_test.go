package e2e

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/websocket"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/cri-streaming/pkg/streaming/portforward"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"

	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// kubelet is the streaming server of a kubelet, in upstream's code. Its containers are processes of this machine. The
// conformance suite runs a complete kubelet with containerd.
type kubelet struct {
	*httptest.Server
	requests chan *http.Request
}

func newKubelet(t *testing.T, s *harness.Server) *kubelet {
	k := &kubelet{requests: make(chan *http.Request, 100)}
	const idle, creation = time.Hour, 30 * time.Second
	mux := http.NewServeMux()
	mux.HandleFunc("/exec/{namespace}/{pod}/{container}", func(w http.ResponseWriter, req *http.Request) {
		opts, err := remotecommand.NewOptions(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		remotecommand.ServeExec(w, req, k, "", "", req.PathValue("container"), req.URL.Query()["command"], opts, idle,
			creation, remotecommand.SupportedStreamingProtocols)
	})
	mux.HandleFunc("/portForward/{namespace}/{pod}", func(w http.ResponseWriter, req *http.Request) {
		opts, err := portforward.NewV4Options(req)
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		portforward.ServePortForward(w, req, k, req.PathValue("pod"), "", opts, idle, creation,
			portforward.SupportedProtocols)
	})
	mux.HandleFunc("/containerLogs/{namespace}/{pod}/{container}", func(w http.ResponseWriter, req *http.Request) {
		if req.PathValue("container") != "c" {
			http.Error(w, "no such container", http.StatusNotFound)
			return
		}
		fmt.Fprintln(w, "first line")
		if req.URL.Query().Get("follow") == "true" {
			http.NewResponseController(w).Flush()
			// the writer's pace: the second line comes after the client has read the first
			time.Sleep(300 * time.Millisecond)
			fmt.Fprintln(w, "second line")
		}
	})
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })
	k.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if len(req.TLS.PeerCertificates) == 0 ||
			req.TLS.PeerCertificates[0].Subject.CommonName != "kube-apiserver-kubelet-client" {
			http.Error(w, "Unauthorized", http.StatusUnauthorized)
			return
		}
		mux.ServeHTTP(w, req)
	}))
	l, err := net.Listen("tcp", "0.0.0.0:0") // a node's address cannot be loopback
	if err != nil {
		t.Fatal(err)
	}
	k.Listener = l
	serving, err := tls.LoadX509KeyPair(s.ServingCertificate("kubelet", harness.HostAddress(t)))
	if err != nil {
		t.Fatal(err)
	}
	k.TLS = &tls.Config{ClientAuth: tls.RequestClientCert, Certificates: []tls.Certificate{serving}}
	k.StartTLS()
	t.Cleanup(k.Close)
	return k
}

// ExecInContainer implements remotecommand.Executor.
func (k *kubelet) ExecInContainer(ctx context.Context, _, _, _ string, command []string, in io.Reader, out,
	errOut io.WriteCloser, _ bool, _ <-chan remotecommand.TerminalSize, _ time.Duration) error {
	cmd := utilexec.New().CommandContext(ctx, command[0], command[1:]...)
	if in != nil {
		cmd.SetStdin(in)
	}
	cmd.SetStdout(out)
	if errOut != nil {
		cmd.SetStderr(errOut)
	}
	return cmd.Run()
}

// PortForward implements portforward.PortForwarder.
func (k *kubelet) PortForward(_ context.Context, _, _ string, port int32, stream io.ReadWriteCloser) error {
	conn, err := net.Dial("tcp", fmt.Sprintf("127.0.0.1:%d", port))
	if err != nil {
		return err
	}
	defer conn.Close()
	go func() { _, _ = io.Copy(conn, stream) }()
	_, err = io.Copy(stream, conn)
	return err
}

// TestStreaming checks exec, logs, port-forward and the proxies over WebSocket and over SPDY. The gateway connects with
// the kubelet client certificate. Exit codes, half-closed input and large outputs arrive complete. Users without the
// permission are rejected.
func TestStreaming(t *testing.T) {
	t.Parallel()
	for name, start := range map[string]func(testing.TB, string, ...string) *harness.Server{
		"up":      harness.Up,
		"split":   harness.Split,
		"compact": harness.Compact,
	} {
		t.Run(name, func(t *testing.T) { streams(t, start(t, "")) })
	}
}

// aWebSocketWatch checks that a watch over WebSocket has a message for each event, and ends with a close message at its
// timeout. By then, the write deadline of its last event has passed.
func aWebSocketWatch(t *testing.T, s *harness.Server, accept string, decode func([]byte, *metav1.WatchEvent) error) {
	t.Helper()
	conf := s.Config()
	cert, err := tls.X509KeyPair(conf.CertData, conf.KeyData)
	if err != nil {
		t.Fatal(err)
	}
	url := strings.Replace(conf.Host, "https://", "wss://", 1) +
		"/api/v1/namespaces?watch=true&resourceVersion=0&timeoutSeconds=5"
	dial, err := websocket.NewConfig(url, conf.Host)
	if err != nil {
		t.Fatal(err)
	}
	dial.Header.Set("Accept", accept)
	dial.TlsConfig = &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{cert}}
	harness.Eventually(t, harness.Soon, func() error { // on a busy machine, the events may come too late
		ws, err := dial.DialContext(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer ws.Close()
		for n := 0; ; n++ {
			var message []byte
			if err := websocket.Message.Receive(ws, &message); err != nil {
				if !errors.Is(err, io.EOF) {
					t.Fatalf("%s: after %d messages: %v", accept, n, err)
				}
				if n < 4 { // the namespaces that every cluster has
					return fmt.Errorf("%s: %d messages", accept, n)
				}
				return nil
			}
			var event metav1.WatchEvent
			if err := decode(message, &event); err != nil || event.Type != "ADDED" {
				t.Fatalf("%s: a message is not an event: %q, %v", accept, message, err)
			}
		}
	})
}

// stalePolicy is a part of a response with Retry-After. It comes after a pause of the machine.
const stalePolicy = "the policy may be stale"

// withFreshPolicy runs kubectl until its output names no stale policy. kubectl does not repeat a rejected upgrade,
// although the response has Retry-After.
func withFreshPolicy(t *testing.T, run func() (output string)) {
	t.Helper()
	harness.Eventually(t, harness.Soon, func() error {
		if out := run(); strings.Contains(out, stalePolicy) {
			return errors.New(out)
		}
		return nil
	})
}

func streams(t *testing.T, s *harness.Server) {
	aWebSocketWatch(t, s, "application/json",
		func(b []byte, e *metav1.WatchEvent) error { return json.Unmarshal(b, e) })
	aWebSocketWatch(t, s, "application/vnd.kubernetes.protobuf",
		func(b []byte, e *metav1.WatchEvent) error { return e.Unmarshal(b) })
	k := newKubelet(t, s)
	_, port, _ := net.SplitHostPort(k.Listener.Addr().String())
	s.Apply(fmt.Sprintf(
		`{apiVersion: v1, kind: Node, metadata: {name: node}, status: {addresses: [{type: InternalIP, address: %q}], `+
			`daemonEndpoints: {kubeletEndpoint: {Port: %s}}}}`, harness.HostAddress(t), port))
	s.Kubectl("patch", "node", "node", "--subresource=status", "--type=merge", "-p",
		fmt.Sprintf(
			`{"status":{"addresses":[{"type":"InternalIP","address":%q}],`+
				`"daemonEndpoints":{"kubeletEndpoint":{"Port":%s}}}}`, harness.HostAddress(t), port))
	s.Kubectl("create", "serviceaccount", "default")
	s.Apply(`{apiVersion: v1, kind: Pod, metadata: {name: p}, spec: {automountServiceAccountToken: false, ` +
		`nodeName: node, containers: [{name: c, image: x}]}}`)
	s.Kubectl("patch", "pod", "p", "--subresource=status", "--type=merge", "-p",
		`{"status":{"phase":"Running","podIP":"127.0.0.1"}}`)
	for _, protocol := range []string{"true", "false"} {
		kubectl := func(input string, args ...string) (stdout, stderr string, code int) {
			withFreshPolicy(t, func() string {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				cmd := exec.CommandContext(ctx, harness.Peer("kubectl"),
					append([]string{"--kubeconfig", s.Kubeconfig, "--cache-dir", filepath.Join(s.Dir, "kubectl-cache")},
						args...)...)
				cmd.Env = append(os.Environ(), "KUBECTL_REMOTE_COMMAND_WEBSOCKETS="+protocol,
					"KUBECTL_PORT_FORWARD_WEBSOCKETS="+protocol)
				var out, errOut bytes.Buffer
				cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &errOut
				_ = cmd.Run()
				stdout, stderr, code = out.String(), errOut.String(), cmd.ProcessState.ExitCode()
				return stderr
			})
			return stdout, stderr, code
		}
		out, errOut, code := kubectl("", "exec", "p", "--", "sh", "-c", "echo out; echo err >&2; exit 7")
		if out != "out\n" || !strings.HasPrefix(errOut, "err\n") || code != 7 {
			t.Errorf("exec: %q %q %d", out, errOut, code)
		}
		if out, errOut, _ = kubectl("half closed", "exec", "-i", "p", "--", "wc",
			"-c"); strings.TrimSpace(out) != "11" {
			t.Errorf("exec -i: %q %q", out, errOut)
		}
		if out, errOut, _ = kubectl("", "exec", "p", "--", "head", "-c", "20000000",
			"/dev/zero"); len(out) != 20000000 {
			t.Errorf("a large output: %d bytes, %q", len(out), errOut)
		}
		web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, "through")
		}))
		_, target, _ := net.SplitHostPort(web.Listener.Addr().String())
		local := porttest.FreePort(t)
		ctx, end := context.WithCancel(t.Context())
		var forwards sync.WaitGroup
		forwards.Go(func() {
			for rejected := true; rejected; {
				forward := exec.CommandContext(ctx, harness.Peer("kubectl"), "--kubeconfig", s.Kubeconfig, "port-forward",
					"pod/p", fmt.Sprintf("%d:%s", local, target))
				forward.Env = append(os.Environ(), "KUBECTL_PORT_FORWARD_WEBSOCKETS="+protocol)
				out, _ := forward.CombinedOutput()
				rejected = strings.Contains(string(out), stalePolicy)
			}
		})
		harness.Eventually(t, harness.Soon, func() error {
			resp, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/", local))
			if err != nil {
				return err
			}
			defer resp.Body.Close()
			b, err := io.ReadAll(resp.Body)
			if string(b) != "through" {
				return fmt.Errorf("%v: %q", err, b)
			}
			return nil
		})
		end()
		forwards.Wait()
		web.Close()
	}
	contains(t, "logs", s.Kubectl("logs", "p"), "first line")
	contains(t, "logs -f", s.Kubectl("logs", "-f", "p"), "first line\nsecond line")
	contains(t, "node proxy", s.Kubectl("get", "--raw", "/api/v1/nodes/node:"+port+"/proxy/healthz"), "ok")
	for _, args := range [][]string{{"exec", "p", "--as=bob", "--", "id"}, {"logs", "p", "--as=bob"},
		{"get", "--raw", "/api/v1/nodes/node/proxy/healthz", "--as=bob"}} {
		var out string
		var err error
		withFreshPolicy(t, func() string {
			out, err = s.TryKubectl("", args...)
			return out
		})
		if err == nil || !strings.Contains(out, "forbidden") && !strings.Contains(out, "Forbidden") {
			t.Errorf("%v as bob: %v %s", args, err, out)
		}
	}
	// A write to the deprecated watch path is authorized as a watch, so it gives a read-only user no write access.
	s.Kubectl("create", "clusterrole", "reader", "--verb=get,list,watch", "--resource=*.*")
	s.Kubectl("create", "clusterrolebinding", "reader", "--clusterrole=reader", "--user=reader")
	for _, path := range []string{"/api/v1/watch/nodes/node/proxy/run/x",
		"/api/v1/watch/namespaces/default/pods/p/proxy/x",
		"/api/v1/namespaces/default/pods//proxy/?fieldSelector=metadata.name%3Dp"} {
		if out, err := s.TryKubectl("{}", "create", "--raw", path, "-f", "-", "--as=reader"); err == nil ||
			strings.Contains(out, "ServiceUnavailable") {
			t.Errorf("POST %s as a reader: %s", path, out)
		}
	}
	withFreshPolicy(t, func() string {
		out, err := s.TryKubectl("", "exec", "nothing", "--", "id")
		if !strings.Contains(out, stalePolicy) && (err == nil || !strings.Contains(out, `pods "nothing" not found`)) {
			t.Errorf("exec in nothing: %s", out)
		}
		return out
	})
	k.CloseClientConnections()
	k.Listener.Close()
	if out, err := s.TryKubectl("", "logs", "p"); err == nil || !strings.Contains(out, "connection refused") {
		t.Errorf("logs from a dead kubelet: %s", out)
	}
}
