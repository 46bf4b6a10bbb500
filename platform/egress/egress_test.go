package egress

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

const header = "apiVersion: apiserver.k8s.io/v1beta1\nkind: EgressSelectorConfiguration\negressSelections:\n"

func TestABadFileIsNamed(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"empty":        {"", "Object 'Kind' is missing"},
		"a typo":       {header + "- {name: cluster, conection: {proxyProtocol: Direct}}", `unknown field`},
		"a name":       {header + "- {name: clusters, connection: {proxyProtocol: Direct}}", "clusters"},
		"no protocol":  {header + "- {name: cluster, connection: {}}", "service.connection.protocol"},
		"no transport": {header + "- {name: cluster, connection: {proxyProtocol: HTTPConnect}}", "transport"},
		"no TLS": {header + "- {name: etcd, connection: {proxyProtocol: HTTPConnect, " +
			`transport: {tcp: {url: "http://127.0.0.1:1"}}}}`,
			`etcd: a proxy at "http://127.0.0.1:1" is not supported`},
		"a direct one": {header + "- {name: cluster, connection: {proxyProtocol: Direct}}", ""},
	} {
		file := filepath.Join(t.TempDir(), "egress.yaml")
		if err := os.WriteFile(file, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := (&Config{File: file}).Open()
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), c.want) ||
			!strings.Contains(err.Error(), "--egress-selector-config-file "+`"`+file) {
			t.Errorf("%s: %v, want the flag, the file and %q", name, err, c.want)
		}
	}
	if _, err := (&Config{File: "/none"}).Open(); err == nil || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("no file: %v", err)
	}
}

func TestWithoutAFileEverythingIsDialledDirectly(t *testing.T) {
	s, err := new(Config).Open()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []Selector{s, {}} {
		if s.Cluster() != nil || s.ControlPlane() != nil || s.Etcd() != nil || s.Lookup() != nil ||
			s.Upstream() != nil {
			t.Error("a network has a dialer without a file")
		}
	}
}

// proxies starts a proxy for each network, which responds with serve, and writes the file that names the proxies.
func proxies(t *testing.T, serve func(name string, c net.Conn)) Selector {
	t.Helper()
	dir, err := os.MkdirTemp("", "ws") // short enough for the path of a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	text := header
	for _, name := range []string{"cluster", "controlplane", "etcd"} {
		socket := filepath.Join(dir, name)
		l, err := net.Listen("unix", socket)
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
				go serve(name, c)
			}
		}()
		text += fmt.Sprintf("- {name: %s, connection: {proxyProtocol: HTTPConnect, transport: {uds: {udsName: %q}}}}\n",
			name, socket)
	}
	file := filepath.Join(dir, "egress.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := (&Config{File: file}).Open()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestEachNetworkHasItsProxy(t *testing.T) {
	s := proxies(t, func(name string, c net.Conn) {
		defer c.Close()
		if req, err := http.ReadRequest(bufio.NewReader(c)); err == nil && req.Host == "x.example.com:1" {
			fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
			_, _ = c.Read(make([]byte, 1)) // the client sends first
			fmt.Fprint(c, name)
		}
	})
	for name, dial := range map[string]func(context.Context, string, string) (net.Conn, error){
		"cluster": s.Cluster().Dial, "controlplane": s.ControlPlane(), "etcd": s.Etcd(),
	} {
		c, err := dial(t.Context(), "tcp", "x.example.com:1")
		if err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 20)
		_, _ = c.Write([]byte("?"))
		n, _ := c.Read(got)
		c.Close()
		if string(got[:n]) != name {
			t.Errorf("%s went by the proxy of %q", name, got[:n])
		}
	}
}

// A proxy that sends nothing fails one dial, and does not block the connection to etcd forever.
func TestUnresponsiveEtcdProxyTimesOut(t *testing.T) {
	timedOut, closed := make(chan struct{}), make(chan error, 1)
	s := proxies(t, func(_ string, c net.Conn) {
		defer c.Close()
		_, _ = http.ReadRequest(bufio.NewReader(c))
		<-timedOut
		fmt.Fprint(c, "HTTP/1.1 200 OK\r\n\r\n")
		_, err := c.Read(make([]byte, 1))
		closed <- err
	})
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := s.Etcd()(ctx, "tcp", "x.example.com:1"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("it ended with %v", err)
	}
	close(timedOut)
	if err := <-closed; err == nil {
		t.Error("the connection that came late was used")
	}
}
