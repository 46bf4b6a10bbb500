package embedded

import (
	"context"
	"crypto/tls"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
)

// runEtcd runs a member until the caller calls stop or the test ends, and waits until it is ready.
func runEtcd(t *testing.T, e *Etcd) (stop func()) {
	t.Helper()
	member, stop := startEtcd(t, e)
	waited, done := context.WithTimeout(t.Context(), 2*time.Minute)
	defer done()
	if err := member.Ready.Wait(waited); err != nil {
		t.Fatal(err)
	}
	return stop
}

// startEtcd runs a member until the caller calls stop or the test ends.
func startEtcd(t *testing.T, e *Etcd) (member lifecycle.Runner, stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	member, ended := e.Runner(), make(chan error, 1)
	go func() { ended <- member.Run(ctx) }()
	stop = sync.OnceFunc(func() { cancel(); <-ended })
	t.Cleanup(stop)
	return member, stop
}

// registryClient returns a client with registry's certificate.
func registryClient(t *testing.T, id rpc.TLS, endpoints ...string) *clientv3.Client {
	t.Helper()
	conf, err := id.ClientConfig("etcd")
	if err != nil {
		t.Fatal(err)
	}
	client, err := clientv3.New(clientv3.Config{Endpoints: endpoints, TLS: conf, Logger: zap.NewNop()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// A member that has lost its data says how to replace it. Once it is replaced, it joins with the same flags, also after
// an interrupted start.
func TestAMemberWithoutDataIsReplaced(t *testing.T) {
	ids := inner(t)
	members := make([]*Etcd, 3)
	var list, endpoints []string
	for n := range members {
		e := &Etcd{
			Dir:    t.TempDir(),
			Listen: "https://" + freeAddress(t),
			ID:     ids("etcd"),
			Name:   fmt.Sprintf("etcd-%d", n),
			Peer:   "https://" + freeAddress(t),
		}
		members[n], list, endpoints = e, append(list, e.Name+"="+e.Peer), append(endpoints, e.Listen)
	}
	var ready []*lifecycle.Readiness
	var stop func()
	for _, e := range members {
		e.InitialCluster = strings.Join(list, ",")
		var member lifecycle.Runner
		member, stop = startEtcd(t, e)
		ready = append(ready, member.Ready)
	}
	for _, r := range ready {
		eventually(t, func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			return r.Wait(ctx)
		})
	}
	lost, registry := members[2], registryClient(t, ids("registry"), endpoints[:2]...)
	stop()
	lost.Dir = t.TempDir()
	err := lost.Runner().Run(t.Context())
	remove := regexp.MustCompile(`member remove ([0-9a-f]+), .*member add etcd-2 --peer-urls=(\S+)`)
	commands := remove.FindStringSubmatch(fmt.Sprint(err))
	if commands == nil {
		t.Fatalf("it starts without data: %v", err)
	}
	id, err := strconv.ParseUint(commands[1], 16, 64)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, func() error { // etcd first waits until the other members have been connected for 5 s
		_, err := registry.MemberRemove(t.Context(), id)
		return err
	})
	eventually(t, func() error {
		_, err := registry.MemberAdd(t.Context(), []string{commands[2]})
		return err
	})
	if err := os.MkdirAll(filepath.Join(lost.Dir, "member", "snap"), 0o700); err != nil { // etcd creates the WAL later
		t.Fatal(err)
	}
	member, stopJoined := startEtcd(t, lost)
	defer stopJoined()
	eventually(t, func() error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		return member.Ready.Wait(ctx)
	})
}

// A member without data does not start a new cluster if a running member belongs to another cluster.
func TestANewMemberMakesNoSecondCluster(t *testing.T) {
	ids := inner(t)
	peers := []string{freeAddress(t), freeAddress(t)}
	list := fmt.Sprintf("etcd-0=https://%s,etcd-1=https://%s", peers[0], peers[1])
	member := func(n int, cluster string) *Etcd {
		return &Etcd{
			Dir:            t.TempDir(),
			Listen:         "https://" + freeAddress(t),
			ID:             ids("etcd"),
			Name:           fmt.Sprintf("etcd-%d", n),
			Peer:           "https://" + peers[n],
			InitialCluster: cluster,
		}
	}
	runEtcd(t, member(0, "etcd-0=https://"+peers[0]))
	err := member(1, list).Runner().Run(t.Context())
	if err == nil || !strings.Contains(err.Error(), "etcd-0 is a member of another cluster") {
		t.Errorf("%v", err)
	}
}

// A member without data waits while another member may run, and starts once that member's port is closed.
func TestAMemberWithoutDataWaitsForTheOthers(t *testing.T) {
	ids := inner(t)
	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = other.Close() })
	e := &Etcd{
		Dir:    t.TempDir(),
		Listen: "https://" + freeAddress(t),
		ID:     ids("etcd"),
		Name:   "etcd-0",
		Peer:   "https://" + freeAddress(t),
	}
	e.InitialCluster = "etcd-0=" + e.Peer + ",etcd-1=https://" + other.Addr().String()
	conf, err := e.config(slog.LevelError)
	if err != nil {
		t.Fatal(err)
	}
	chosen := make(chan error, 1)
	go func() { chosen <- e.chooseClusterState(t.Context(), conf) }()
	for range 2 { // the second is a retry
		conn, err := other.Accept()
		if err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-chosen:
			t.Fatalf("it does not wait: %v", err)
		default:
		}
		_ = conn.Close()
	}
	_ = other.Close()
	if err := <-chosen; err != nil {
		t.Error(err)
	}
}

// Only a closed port and a name that does not exist mean that a member does not run.
func TestErrorsOfAMemberThatDoesNotRun(t *testing.T) {
	request := func(err error) error {
		return &url.Error{Op: "Get", Err: &net.OpError{Op: "dial", Err: err}}
	}
	for err, want := range map[error]bool{
		os.NewSyscallError("connect", syscall.ECONNREFUSED):         true,
		&net.DNSError{Err: "no such host", IsNotFound: true}:        true,
		&net.DNSError{Err: "server misbehaving", IsTemporary: true}: false,
		&net.DNSError{Err: "i/o timeout", IsTimeout: true}:          false,
		os.NewSyscallError("connect", syscall.EHOSTUNREACH):         false,
		context.DeadlineExceeded:                                    false,
	} {
		if got := isDown(request(err)); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}

// The certificate of a peer need not have the address that the peer connects from.
func TestPeersAreIdentifiedWithoutDNS(t *testing.T) {
	id := inner(t)("etcd")
	e := Etcd{Dir: t.TempDir(), Listen: "https://127.0.0.1:1", Peer: "https://127.0.0.1:2", ID: id}
	conf, err := e.config(slog.LevelError)
	if err != nil {
		t.Fatal(err)
	}
	listener, err := transport.NewListener("127.0.0.1:0", "https", &conf.PeerTLSInfo)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for conn, err := listener.Accept(); err == nil; conn, err = listener.Accept() {
			_, _ = conn.Write([]byte("accepted"))
		}
	}()
	ca, err := pki.OpenCA(filepath.Dir(id.CAFile), "inner-ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"etcd": true, "registry": false} {
		leaf := pki.Leaf{Name: "elsewhere-" + name, CommonName: name, SANs: []string{"elsewhere.invalid"}, Usage: pki.Client}
		crt, key, _, err := ca.Leaf(leaf)
		if err != nil {
			t.Fatal(err)
		}
		client, err := rpc.TLS{CertFile: crt, KeyFile: key, CAFile: ca.CertFile()}.ClientConfig("etcd")
		if err != nil {
			t.Fatal(err)
		}
		conn, err := tls.Dial("tcp", listener.Addr().String(), client)
		if err == nil {
			_, err = conn.Read(make([]byte, 1))
			_ = conn.Close()
		}
		if (err == nil) != want {
			t.Errorf("a peer with %s's certificate: %v", name, err)
		}
	}
}

// TestProbesPassWhileEtcdHasNoSpace checks the paths of the manifest's probes. A member that the kubelet kills because
// its quota is used up could not serve the deletions that free it.
func TestProbesPassWhileEtcdHasNoSpace(t *testing.T) {
	manifest, err := os.ReadFile("../../deploy/k8s/components/etcd/etcd.yaml")
	if err != nil {
		t.Fatal(err)
	}
	probes := regexp.MustCompile(`httpGet: \{path: "?([^",]+)`).FindAllStringSubmatch(string(manifest), -1)
	if len(probes) != 3 {
		t.Fatalf("the manifest has the probes %q", probes)
	}
	ids := inner(t)
	e := &Etcd{
		Dir:     t.TempDir(),
		Listen:  "https://" + freeAddress(t),
		Metrics: "http://" + freeAddress(t),
		ID:      ids("etcd"),
	}
	runEtcd(t, e)
	registry := registryClient(t, ids("registry"), e.Listen)
	full := &etcdserverpb.AlarmRequest{
		Action: etcdserverpb.AlarmRequest_ACTIVATE,
		Alarm:  etcdserverpb.AlarmType_NOSPACE,
	}
	if _, err := etcdserverpb.NewMaintenanceClient(registry.ActiveConnection()).Alarm(t.Context(), full); err != nil {
		t.Fatal(err)
	}
	status := func(path string) int {
		resp, err := http.Get(e.Metrics + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	if got := status("/health"); got != http.StatusServiceUnavailable {
		t.Errorf("/health: %d; the alarm has no effect", got)
	}
	for _, probe := range probes {
		if got := status(probe[1]); got != http.StatusOK {
			t.Errorf("%s: %d", probe[1], got)
		}
	}
}
