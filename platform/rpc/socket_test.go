package rpc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
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
	l, err := Listen(Address{Path: path}.String())
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
	if l, err := Listen(Address{Path: path}.String()); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("two listen: %v, %v", l, err)
	}
	file := filepath.Join(dir, "f")
	if err := os.WriteFile(file, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err := Listen(Address{Path: file}.String()); err == nil {
		t.Errorf("listens on a file: %v", l)
	}
	if kept, err := os.ReadFile(file); string(kept) != "kept" {
		t.Errorf("%q, %v", kept, err)
	}
}

// inner is a server of registry's on a socket, and the CA of those who call it.
type inner struct {
	ca *pki.CA
	at Address
}

func newInner(t *testing.T) *inner {
	t.Helper()
	ca := newCA(t)
	s, err := NewServer(identityOf(t, ca, "registry", pki.Server))
	if err != nil {
		t.Fatal(err)
	}
	registryv1.RegisterObjectsServer(s, &fake{get: func(context.Context,
		*registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		return &registryv1.ObjectResponse{Body: bytes.Repeat([]byte("body"), 1<<18)}, nil
	}})
	s.SetReady(true)
	in := &inner{ca, Address{Path: filepath.Join(t.TempDir(), "s")}}
	l, err := Listen(in.at.String())
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

// getAt calls registry, wherever it is.
func getAt(t *testing.T, id TLS, address string) (*registryv1.ObjectResponse, error) {
	t.Helper()
	conn, err := Dial(id, "registry", Addresses{address})
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
	gateway := identityOf(t, in.ca, "gateway", pki.Client)
	if r, err := getAt(t, gateway, in.at.String()); err != nil || len(r.Body) != 4<<18 {
		t.Errorf("gateway: %d bytes, %v", len(r.GetBody()), err)
	}
	authz := identityOf(t, in.ca, "authz", pki.Client)
	if _, err := getAt(t, authz, in.at.String()); status.Code(err) != codes.PermissionDenied {
		t.Errorf("authz may not call it: %v", err)
	}
	other := newCA(t)
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
		conn, err := net.Dial("unix", in.at.Path)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(5 * time.Second))
		_, _, err = socketCredentials{credentials.NewTLS(conf)}.ClientHandshake(t.Context(), c.server, conn)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		conn.Close()
	}
}

// relayed is where a process stands between a caller and the server: it hands on what both say, and keeps it.
func (in *inner) relayed(t *testing.T) (address string, seen func() []byte) {
	t.Helper()
	spy := filepath.Join(t.TempDir(), "spy")
	l, err := net.Listen("unix", spy)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	var mu sync.Mutex
	var all bytes.Buffer
	relay := func(from, to net.Conn) {
		defer to.Close()
		buf := make([]byte, 1<<10)
		for {
			n, err := from.Read(buf)
			mu.Lock()
			all.Write(buf[:n])
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
			far, err := net.Dial("unix", in.at.Path)
			if err != nil {
				near.Close()
				return
			}
			go relay(near, far)
			go relay(far, near)
		}
	}()
	return Address{Path: spy}.String(), func() []byte {
		mu.Lock()
		defer mu.Unlock()
		return bytes.Clone(all.Bytes())
	}
}

// What is said after the handshake crosses as it is. (The relay is this process, so it is not told from the caller.)
func TestOverASocketBytesCrossAsTheyAre(t *testing.T) {
	in := newInner(t)
	address, seen := in.relayed(t)
	r, err := getAt(t, identityOf(t, in.ca, "gateway", pki.Client), address)
	if err != nil || len(r.Body) != 4<<18 || !bytes.Contains(seen(), bytes.Repeat([]byte("body"), 64)) {
		t.Errorf("%d bytes, %v; %d bytes were seen", len(r.GetBody()), err, len(seen()))
	}
}

// A process that stands between two others gets nothing of what they say, and cannot speak for either: the client hears
// within TLS that the other end of the server's socket is somebody else.
func TestOverASocketNobodyStandsBetween(t *testing.T) {
	if os.Getenv(relayedTo) != "" { // the process that calls
		dir := os.Getenv(relayedTo + "_PKI")
		_, err := getAt(t, TLS{
			CertFile: filepath.Join(dir, "gateway.crt"),
			KeyFile:  filepath.Join(dir, "gateway.key"),
			CAFile:   filepath.Join(dir, "inner-ca.crt"),
		}, os.Getenv(relayedTo))
		fmt.Printf("it answers: %v\n", err)
		return
	}
	in := newInner(t)
	id := identityOf(t, in.ca, "gateway", pki.Client)
	address, seen := in.relayed(t)
	for at, want := range map[string]string{in.at.String(): "it answers: <nil>", address: "in place of this one"} {
		caller := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v")
		caller.Env = append(os.Environ(), relayedTo+"="+at, relayedTo+"_PKI="+filepath.Dir(id.CertFile))
		out, err := caller.CombinedOutput()
		if err != nil || !bytes.Contains(out, []byte(want)) {
			t.Errorf("%s: %v, want %q\n%s", at, err, want, out)
		}
	}
	if bytes.Contains(seen(), []byte("PRI * HTTP/2")) {
		t.Error("the process between hears what is said")
	}
}

// relayedTo tells a process of TestOverASocketNobodyStandsBetween whom to call.
const relayedTo = "WATERSHED_TEST_RELAYED_TO"

func TestASocketIsOneUsers(t *testing.T) {
	if err := sameUser(uint32(os.Geteuid())); err != nil {
		t.Error(err)
	}
	if err := sameUser(uint32(os.Geteuid()) + 1); err == nil {
		t.Error("another user's process is spoken to")
	}
}

// A peer that leaves amid its handshake, or says something else than TLS, is let go at once.
func TestOverASocketOnlyHandshakesAreHeard(t *testing.T) {
	ca := newCA(t)
	conf, err := identityOf(t, ca, "registry", pki.Server).ServerConfig()
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for name, c := range map[string]struct {
		says   string
		leaves bool
	}{
		"HTTP/1.1":        {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", false},
		"HTTP/2":          {"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", false},
		"a huge record":   {"\x16\x03\x01\xff\xff" + strings.Repeat("x", 1<<16), false},
		"an empty record": {"\x16\x03\x01\x00\x00", true},
		"half a header":   {"\x16\x03", true},
		"half a record":   {"\x16\x03\x01\x00\x09x", true},
		"nothing":         {"", true},
	} {
		client, err := net.Dial("unix", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			_, _ = client.Write([]byte(c.says))
			if c.leaves {
				client.Close()
			}
		}()
		server, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = server.SetDeadline(time.Now().Add(10 * time.Second))
		_, _, err = socketCredentials{credentials.NewTLS(conf)}.ServerHandshake(server)
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		server.Close()
		client.Close()
	}
}
