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

// Listen removes the socket of a killed process, and no other file.
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

// inner is a registry server on a socket, with the CA of its clients.
type inner struct {
	ca *pki.CA
	at Address
}

func newInner(t *testing.T) *inner {
	t.Helper()
	ca := newCA(t)
	s, err := NewServer(map[string]TLS{"registry": identityOf(t, ca, "registry", pki.Server)})
	if err != nil {
		t.Fatal(err)
	}
	registryv1.RegisterObjectsServer(s, &fake{get: func(context.Context,
		*registryv1.GetRequest) (*registryv1.ObjectResponse, error) {
		return &registryv1.ObjectResponse{Body: bytes.Repeat([]byte("body"), 1<<18)}, nil
	}})
	s.SetReady("registry", true)
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

// getAt calls the registry at an address.
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

// Over a socket, certificates identify clients and servers, as over TCP.
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
		_ = conn.SetDeadline(time.Now().Add(2 * time.Minute))
		_, _, err = socketCredentials{credentials.NewTLS(conf)}.ClientHandshake(t.Context(), c.server, conn)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", name, err)
		}
		conn.Close()
	}
}

// relayed returns the address of a relay between clients and the server. seen returns the bytes that it has forwarded.
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

// Bytes after the handshake are not encrypted. (The relay is in this process, so its PID is the same as the client's.)
func TestOverASocketBytesCrossAsTheyAre(t *testing.T) {
	in := newInner(t)
	address, seen := in.relayed(t)
	r, err := getAt(t, identityOf(t, in.ca, "gateway", pki.Client), address)
	if err != nil || len(r.Body) != 4<<18 || !bytes.Contains(seen(), bytes.Repeat([]byte("body"), 64)) {
		t.Errorf("%d bytes, %v; %d bytes were seen", len(r.GetBody()), err, len(seen()))
	}
}

// A relay in another process cannot read or send calls. The client detects in TLS that the server's peer is another
// process.
func TestRelaysOnSocketsAreDetected(t *testing.T) {
	if os.Getenv(relayedTo) != "" { // the client process
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
		t.Error("the relay reads calls")
	}
}

// relayedTo has the address that a client process of TestRelaysOnSocketsAreDetected calls.
const relayedTo = "WATERSHED_TEST_RELAYED_TO"

func TestASocketIsOneUsers(t *testing.T) {
	if err := sameUser(uint32(os.Geteuid())); err != nil {
		t.Error(err)
	}
	if err := sameUser(uint32(os.Geteuid()) + 1); err == nil {
		t.Error("another user's process is accepted")
	}
}

// The server closes a connection at once if the peer leaves during the handshake, or sends bytes that are not TLS.
func TestSocketsAcceptOnlyTLS(t *testing.T) {
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
		_ = server.SetDeadline(time.Now().Add(2 * time.Minute))
		_, _, err = socketCredentials{credentials.NewTLS(conf)}.ServerHandshake(server)
		if err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%s: %v", name, err)
		}
		server.Close()
		client.Close()
	}
}
