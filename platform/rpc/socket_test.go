package rpc

import (
	"bytes"
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/pki"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

func TestSocketsAreAbsoluteAndClean(t *testing.T) {
	for address, want := range map[string]bool{
		"unix:/run/w/registry-0.rpc": true,
		"unix:run/w":                 false,
		"unix:":                      false,
		"unix:///run/w":              false,
		"unix:/run/../w":             false,
		"127.0.0.1:80":               false,
		"/run/w":                     false,
	} {
		if path, ok := Socket(address); ok != want || ok && SocketAddress(path) != address {
			t.Errorf("%q: %q, %v", address, path, ok)
		}
	}
}

// What a killed process left is taken away; nothing else is.
func TestASocketIsListenedOnOnce(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	left, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	left.SetUnlinkOnClose(false)
	left.Close()
	l, err := listen(SocketAddress(path))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if l, err := listen(SocketAddress(path)); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("two listen: %v, %v", l, err)
	}
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := listen(SocketAddress(file)); err == nil {
		t.Errorf("listens on a file: %v", l)
	}
	if kept, err := os.ReadFile(file); string(kept) != "kept" {
		t.Errorf("%q, %v", kept, err)
	}
}

// inner is a server of registry's on a socket, and the CA of those who call it.
type inner struct {
	ca      *pki.CA
	address string
}

func newInner(t *testing.T) *inner {
	t.Helper()
	ca, err := pki.OpenCA(t.TempDir(), "inner-ca", "inner")
	if err != nil {
		t.Fatal(err)
	}
	s, err := NewServer(identityOf(t, ca, "registry", pki.Server))
	if err != nil {
		t.Fatal(err)
	}
	registryv1.RegisterObjectsServer(s, &fake{get: func(context.Context,
		*registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		return &registryv1.ObjectResponse{Body: bytes.Repeat([]byte("body"), 1<<18)}, nil
	}})
	s.SetReady(true)
	in := &inner{ca, SocketAddress(filepath.Join(t.TempDir(), "s"))}
	l, err := listen(in.address)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- s.serve(ctx, l, time.Second) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return in
}

func (in *inner) get(t *testing.T, id TLS, address string) (*registryv1.ObjectResponse, error) {
	t.Helper()
	conn, err := Dial(id, "registry", TakeTurns, Addresses{address})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	return registryv1.NewObjectsClient(conn).Get(ctx, &registryv1.GetRequest{})
}

// Over a socket callers are known by their certificates, as over TCP, and so are servers.
func TestOverASocketServicesKnowEachOther(t *testing.T) {
	in := newInner(t)
	if r, err := in.get(t, identityOf(t, in.ca, "gateway", pki.Client), in.address); err != nil ||
		len(r.Body) != 4<<18 {
		t.Errorf("gateway: %d bytes, %v", len(r.GetBody()), err)
	}
	if _, err := in.get(t, identityOf(t, in.ca, "authz", pki.Client), in.address); status.Code(err) != codes.PermissionDenied {
		t.Errorf("authz may not call it: %v", err)
	}
	other, err := pki.OpenCA(t.TempDir(), "inner-ca", "inner")
	if err != nil {
		t.Fatal(err)
	}
	gateway := identityOf(t, in.ca, "gateway", pki.Client)
	stranger := identityOf(t, other, "gateway", pki.Client)
	stranger.CAFile = in.ca.CertFile()
	for name, c := range map[string]struct {
		id     TLS
		server string
		says   string
	}{
		"gateway":                   {gateway, "registry", ""},
		"a stranger":                {stranger, "registry", "bad certificate"},
		"registry passes for authn": {gateway, "authn", "not authn"},
	} {
		conf, err := c.id.ClientConfig(c.server)
		if err != nil {
			t.Fatal(err)
		}
		path, _ := Socket(in.address)
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		_, _, err = onSockets{credentials.NewTLS(conf)}.ClientHandshake(t.Context(), c.server, conn)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		conn.Close()
	}
}

// What is said after the handshake crosses as it is; keys and certificates prove who says it before.
func TestOverASocketBytesCrossAsTheyAre(t *testing.T) {
	in := newInner(t)
	target, _ := Socket(in.address)
	spy := filepath.Join(t.TempDir(), "spy")
	l, err := net.Listen("unix", spy)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var mu sync.Mutex
	var seen bytes.Buffer
	relay := func(from, to net.Conn) {
		defer to.Close()
		buf := make([]byte, 1<<10)
		for {
			n, err := from.Read(buf)
			mu.Lock()
			seen.Write(buf[:n])
			mu.Unlock()
			if _, werr := to.Write(buf[:n]); errors.Join(err, werr) != nil {
				return
			}
		}
	}
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("unix", target)
			if err != nil {
				near.Close()
				return
			}
			go relay(near, far)
			go relay(far, near)
		}
	}()
	r, err := in.get(t, identityOf(t, in.ca, "gateway", pki.Client), SocketAddress(spy))
	mu.Lock()
	defer mu.Unlock()
	if err != nil || len(r.Body) != 4<<18 || !bytes.Contains(seen.Bytes(), bytes.Repeat([]byte("body"), 64)) {
		t.Errorf("%d bytes, %v; %d bytes were seen", len(r.GetBody()), err, seen.Len())
	}
}

// A peer that does not end its handshake, or says something else than TLS, is let go.
func TestOverASocketOnlyHandshakesAreHeard(t *testing.T) {
	ca, err := pki.OpenCA(t.TempDir(), "inner-ca", "inner")
	if err != nil {
		t.Fatal(err)
	}
	conf, err := identityOf(t, ca, "registry", pki.Server).ServerConfig()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, says := range map[string]string{
		"HTTP/2":          "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
		"a huge record":   "\x16\x03\x01\xff\xff" + strings.Repeat("x", 1<<16),
		"an empty record": "\x16\x03\x01\x00\x00",
		"half a header":   "\x16\x03",
		"nothing":         "",
	} {
		go func() {
			c, err := net.Dial("unix", l.Addr().String())
			if err != nil {
				t.Error(err)
				return
			}
			_, _ = c.Write([]byte(says))
			c.Close()
		}()
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.SetDeadline(time.Now().Add(5 * time.Second))
		_, _, err = onSockets{credentials.NewTLS(conf)}.ServerHandshake(c)
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		c.Close()
	}
}
