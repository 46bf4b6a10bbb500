package proxy

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/transport"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func newTestHandler(t *testing.T) *Handler {
	t.Helper()
	k, err := New(&Config{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// serve proxies a GET. It returns the client's response and the error.
func serve(k *Handler, c *registryv1.Connection) (w *httptest.ResponseRecorder, failed error) {
	w = httptest.NewRecorder()
	k.Serve(w, httptest.NewRequest("GET", "/api/v1/namespaces/x/pods/a/proxy/page", nil), "a", c, func(err error) {
		failed = err
	})
	return w, failed
}

// A proxied request reaches the pod, and its response reaches the client. An unreachable pod is an error.
func TestARequestIsProxied(t *testing.T) {
	pod := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-From", "pod")
		w.WriteHeader(http.StatusTeapot)
		fmt.Fprintf(w, "%s %s", r.Method, r.URL.Path)
	}))
	defer pod.Close()
	w, err := serve(newTestHandler(t), &registryv1.Connection{
		Url:       pod.URL + "/page",
		Transport: registryv1.Transport_TRANSPORT_PROXY,
	})
	if err != nil || w.Code != http.StatusTeapot || w.Body.String() != "GET /page" ||
		w.Header().Get("X-From") != "pod" {
		t.Errorf("%d %q %v, %v", w.Code, w.Body, w.Header(), err)
	}
	if _, err := serve(newTestHandler(t), &registryv1.Connection{
		Url:       "http://127.0.0.1:1/",
		Transport: registryv1.Transport_TRANSPORT_PROXY,
	}); err == nil {
		t.Error("an unreachable pod is no error")
	}
	if _, err := serve(newTestHandler(t), &registryv1.Connection{Url: pod.URL}); err == nil {
		t.Error("an unknown transport is no error")
	}
}

// A log is the kubelet's unchanged response, and its headers do not wait for its first line. A rejection of the kubelet
// becomes an API error, and redirects are not followed.
func TestLogs(t *testing.T) {
	kubelet := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/log":
			fmt.Fprint(w, "line 1\nline 2\n")
		case "/missing":
			http.Error(w, `container "c" not found`, http.StatusBadRequest)
		default:
			http.Redirect(w, r, "/log", http.StatusFound)
		}
	}))
	defer kubelet.Close()
	log := func(path string, follow bool) (*httptest.ResponseRecorder, error) {
		return serve(newTestHandler(t), &registryv1.Connection{
			Url:         kubelet.URL + path,
			Transport:   registryv1.Transport_TRANSPORT_KUBELET_INSECURE,
			ContentType: "text/plain",
			Flush:       follow,
		})
	}
	for _, follow := range []bool{true, false} {
		if w, err := log("/log", follow); err != nil || w.Body.String() != "line 1\nline 2\n" ||
			w.Header().Get("Content-Type") != "text/plain" || !w.Flushed {
			t.Errorf("follow=%v: %q %v, flushed: %v, %v", follow, w.Body, w.Header(), w.Flushed, err)
		}
	}
	if _, err := log("/missing", false); !apierrors.IsBadRequest(err) ||
		!strings.Contains(err.Error(), `container "c" not found`) {
		t.Errorf("%v", err)
	}
	if w, err := log("/elsewhere", false); err == nil {
		t.Errorf("a redirect is followed: %d %q", w.Code, w.Body)
	}
	if w, err := serve(newTestHandler(t), &registryv1.Connection{}); err != nil || w.Code != http.StatusNoContent {
		t.Errorf("a pod that is not scheduled yet: %d, %v", w.Code, err)
	}
}

func TestBadFilesNameTheirFlags(t *testing.T) {
	if _, err := New(&Config{
		KubeletCertFile: "/none",
		KubeletKeyFile:  "/none",
	}, nil); err == nil || !strings.Contains(err.Error(), "--kubelet-client-certificate") {
		t.Errorf("%v", err)
	}
}

// Nodes and pods are dialled through the egress proxy, if it is configured.
func TestClusterIsDialledThroughEgress(t *testing.T) {
	var dialled []string
	k, err := New(&Config{}, &transport.DialHolder{Dial: func(_ context.Context, _, address string) (net.Conn, error) {
		dialled = append(dialled, address)
		return nil, errors.New("no way")
	}})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*registryv1.Connection{
		{Url: "https://node.example.com:1/", Transport: registryv1.Transport_TRANSPORT_KUBELET},
		{Url: "https://node.example.com:2/", Transport: registryv1.Transport_TRANSPORT_KUBELET_INSECURE},
		{Url: "http://pod.example.com:3/", Transport: registryv1.Transport_TRANSPORT_PROXY},
	} {
		if _, err := serve(k, c); err == nil || !strings.Contains(err.Error(), "no way") {
			t.Errorf("%s: %v", c.Url, err)
		}
	}
	want := []string{"node.example.com:1", "node.example.com:2", "pod.example.com:3"}
	if !slices.Equal(dialled, want) {
		t.Errorf("dialled %v, want %v", dialled, want)
	}
}

// The gateway reads 50 KB of a kubelet's error, as kube-apiserver does.
func TestAKubeletsErrorIsCut(t *testing.T) {
	kubelet := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, strings.Repeat("x", 60_000), http.StatusInternalServerError)
	}))
	defer kubelet.Close()
	_, err := serve(newTestHandler(t), &registryv1.Connection{
		Url:         kubelet.URL,
		Transport:   registryv1.Transport_TRANSPORT_KUBELET_INSECURE,
		ContentType: "text/plain",
	})
	if n := strings.Count(fmt.Sprint(err), "x"); n < 49_000 || n > 51_000 {
		t.Errorf("an error has %d bytes of the kubelet's: %.200v", n, err)
	}
}

// An upgraded connection transfers at most --max-connection-bytes-per-sec.
func TestAnUpgradeHasItsRate(t *testing.T) {
	const rate, bytes = 20_000, 40_000
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n%s",
			strings.Repeat("x", bytes))
	}))
	defer backend.Close()
	k := newTestHandler(t)
	k.config.Rate = rate
	front := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		k.Serve(w, req, "a", &registryv1.Connection{
			Url:       backend.URL,
			Transport: registryv1.Transport_TRANSPORT_PROXY,
		}, func(err error) { t.Error(err) })
	}))
	defer front.Close()
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", front.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	began := time.Now()
	fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: x\r\n\r\n")
	if _, err := io.CopyN(io.Discard, conn, bytes); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took < time.Second {
		t.Errorf("%d bytes take %v at %d bytes a second", bytes, took, rate)
	}
}
