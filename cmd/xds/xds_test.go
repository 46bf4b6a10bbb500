package xds

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	endpoint "github.com/envoyproxy/go-control-plane/envoy/config/endpoint/v3"
	"github.com/envoyproxy/go-control-plane/pkg/resource/v3"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	healthv1 "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	grpcxds "google.golang.org/grpc/xds"
	"google.golang.org/grpc/xds/bootstrap"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/porttest"
	"watershed.dev/platform/rpc"
)

// identities issues the certificates of one inner network.
func identities(t testing.TB) func(name string) rpc.TLS {
	t.Helper()
	dir := t.TempDir()
	ca, err := pki.OpenCA(dir, "inner-ca", "test")
	if err != nil {
		t.Fatal(err)
	}
	return func(name string) rpc.TLS {
		crt, key, _, err := ca.Leaf(pki.Leaf{
			Name:       name,
			CommonName: name,
			SANs:       []string{name},
			Usage:      pki.Client | pki.Server,
		})
		if err != nil {
			t.Fatal(err)
		}
		return rpc.TLS{CertFile: crt, KeyFile: key, CAFile: ca.CertFile()}
	}
}

// serve runs a server until the test ends, and returns its address.
func serve(t testing.TB, name string, id rpc.TLS, address string, register func(context.Context, *rpc.Server)) string {
	t.Helper()
	s, err := rpc.NewServer(map[string]rpc.TLS{name: id})
	if err != nil {
		t.Fatal(err)
	}
	if register != nil {
		register(t.Context(), s)
	}
	l, err := rpc.Listen(address)
	if err != nil {
		t.Fatal(err)
	}
	s.SetReady(name, true)
	go func() { _ = s.Server.Serve(l) }()
	t.Cleanup(s.Stop)
	return addressAt(l.Addr())
}

// addressAt returns the xDS address of a replica on a listener.
func addressAt(a net.Addr) string {
	if a.Network() == "unix" {
		return rpc.Address{Path: a.String()}.String()
	}
	return a.String()
}

// fixture is an xDS server with the identities of its clients and the replicas that it may publish.
type fixture struct {
	id       func(string) rpc.TLS
	server   *server
	address  string
	replicas []Replica
}

func newFixture(t testing.TB, replicas int) *fixture {
	t.Helper()
	w := &fixture{id: identities(t), server: newServer("")}
	w.address = serve(
		t,
		"xds",
		w.id("xds"),
		"127.0.0.1:0",
		func(ctx context.Context, s *rpc.Server) { w.server.register(ctx, s) },
	)
	for range replicas {
		w.replicas = append(w.replicas, Replica{Address: serve(t, "registry", w.id("registry"), "127.0.0.1:0", nil)})
	}
	return w
}

// onSocket adds a replica on a Unix socket.
func (w *fixture) onSocket(t testing.TB) {
	t.Helper()
	address := rpc.Address{Path: filepath.Join(t.TempDir(), "s")}.String()
	w.replicas = append(w.replicas, Replica{Address: serve(t, "registry", w.id("registry"), address, nil)})
}

// client dials registry with its own xDS client.
func (w *fixture) client(t testing.TB, c rpc.XDSConfig) *grpc.ClientConn {
	t.Helper()
	c.Node = t.Name()
	if c.Servers == nil {
		c.Servers = []string{w.address}
	}
	x, err := rpc.NewXDS(w.id("gateway"), c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	go x.Run(ctx)
	conn, err := rpc.Dial(w.id("gateway"), "registry", x)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close(); cancel() })
	return conn
}

// answering returns the replicas that answer a number of calls.
func answering(t *testing.T, conn *grpc.ClientConn) []string {
	t.Helper()
	var all []string
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		var p peer.Peer
		_, err := healthv1.NewHealthClient(conn).
			Check(ctx, &healthv1.HealthCheckRequest{}, grpc.Peer(&p), grpc.WaitForReady(true))
		cancel()
		if err != nil {
			t.Fatal(err)
		}
		if a := addressAt(p.Addr); !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	slices.Sort(all)
	return all
}

// becomes waits until exactly the given replicas answer the calls.
func becomes(t *testing.T, conn *grpc.ClientConn, replicas ...Replica) {
	t.Helper()
	var want []string
	for _, r := range replicas {
		want = append(want, r.Address)
	}
	slices.Sort(want)
	deadline := time.Now().Add(2 * time.Minute)
	for got := answering(t, conn); !slices.Equal(got, want); got = answering(t, conn) {
		if time.Now().After(deadline) {
			t.Fatalf("%q answer, want %q", got, want)
		}
	}
}

// Clients call the published replicas and receive changes. They ignore empty endpoint lists and invalid resources.
func TestClientsFollowReplicas(t *testing.T) {
	w := newFixture(t, 3)
	conn := w.client(t, rpc.XDSConfig{})
	go w.server.set("registry", slices.Clone(w.replicas[:1])) // the first call waits for it
	becomes(t, conn, w.replicas[0])
	w.server.set("registry", slices.Clone(w.replicas))
	becomes(t, conn, w.replicas...)
	w.server.set("registry", slices.Clone(w.replicas[1:]))
	becomes(t, conn, w.replicas[1:]...)

	w.server.set("registry", nil)
	if n := testutil.ToFloat64(w.server.empties.WithLabelValues("registry")); n != 1 {
		t.Errorf("%v times a source named nothing", n)
	}
	eds := w.server.caches[resource.EndpointType]
	nothing := &endpoint.ClusterLoadAssignment{ClusterName: "registry"}
	rubbish := endpointsOf("registry", w.replicas)
	rubbish.Endpoints[0].LbEndpoints[0].GetEndpoint().Address = nil
	for _, bad := range []*endpoint.ClusterLoadAssignment{nothing, rubbish} {
		if err := eds.UpdateResource("registry", bad); err != nil {
			t.Fatal(err)
		}
	}
	for deadline := time.Now().Add(2 * time.Minute); testutil.ToFloat64(w.server.refused) == 0; {
		if time.Now().After(deadline) {
			t.Fatal("rubbish is not refused")
		}
		time.Sleep(time.Millisecond)
	}
	becomes(t, conn, w.replicas[1:]...)
	w.server.replicas["registry"] = nil
	w.server.set("registry", slices.Clone(w.replicas[:2]))
	becomes(t, conn, w.replicas[:2]...)
}

// A client keeps its endpoints while the server is down, and caches them for the next process. Before the first
// response the client uses the addresses of the flags.
func TestClientsGoOnWithoutAServer(t *testing.T) {
	w := newFixture(t, 2)
	w.onSocket(t)
	dir := t.TempDir()
	known := []Replica{w.replicas[0], w.replicas[2]}
	w.server.set("registry", slices.Clone(known))
	first := w.client(t, rpc.XDSConfig{Dir: dir})
	becomes(t, first, known...)
	cache := filepath.Join(dir, "registry") // the client writes it after it has given the endpoints to its connections
	for deadline := time.Now().Add(2 * time.Minute); ; time.Sleep(time.Millisecond) {
		if _, err := os.Stat(cache); err == nil {
			break
		} else if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	nobody := []string{"127.0.0.1:1"}
	becomes(t, w.client(t, rpc.XDSConfig{Dir: dir, Servers: nobody}), known...)
	becomes(t, w.client(t, rpc.XDSConfig{
		Servers:  nobody,
		Fallback: map[string][]string{"registry": {w.replicas[1].Address}},
	}), w.replicas[1])
}

// The series of each service exist before the first update without a replica. The alert NoReplicas relies on it.
func TestMetricsBeginWithEveryService(t *testing.T) {
	s := newServer("")
	s.waitFor("registry")
	s.set("authz", []Replica{{Address: "192.0.2.3:1"}}) // a file is its source
	if n := testutil.CollectAndCount(s.empties); n != 2 {
		t.Errorf("watershed_xds_empty_total has %d series, want 2", n)
	}
}

// A server starts with the state of the previous process, and skips invalid entries.
func TestStateIsRestored(t *testing.T) {
	state := filepath.Join(t.TempDir(), "state.json")
	s := newServer(state)
	s.waitFor("registry")
	if s.ready.Err() == nil {
		t.Error("it is ready without a replica")
	}
	s.set("registry", []Replica{{Address: "192.0.2.2:1", Zone: "b"}, {Address: "192.0.2.1:1"}})
	s.set("authz", []Replica{{Address: "192.0.2.3:1"}})
	again := newServer(state)
	again.waitFor("registry")
	if got := fmt.Sprint(again.replicas); again.ready.Err() != nil ||
		got != "map[authz:[{192.0.2.3:1 }] registry:[{192.0.2.1:1 } {192.0.2.2:1 b}]]" {
		t.Errorf("%s, %v", got, again.ready.Err())
	}
	for _, odd := range []string{"", "{", `{"registry":[{"address":"nowhere"}]}`, `{"registry":[]}`} {
		if err := os.WriteFile(state, []byte(odd), 0o600); err != nil {
			t.Fatal(err)
		}
		if s := newServer(state); len(s.replicas) != 0 {
			t.Errorf("%q: %v", odd, s.replicas)
		}
	}
}

// gRPC's own xDS client resolves the replicas too, and uses the policy of the cluster.
func TestGRPCsOwnClientIsServed(t *testing.T) {
	w := newFixture(t, 2)
	bootstrap.RegisterChannelCredentials(innerCredentials{w.id("gateway")})
	config, err := json.Marshal(map[string]any{
		"node": map[string]any{"id": "test"},
		"xds_servers": []any{map[string]any{
			"server_uri":      "passthrough:///" + w.address,
			"server_features": []string{"xds_v3"},
			"channel_creds":   []any{map[string]any{"type": "inner"}},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	builder, err := grpcxds.NewXDSResolverWithConfigForTesting(config)
	if err != nil {
		t.Fatal(err)
	}
	tls, err := w.id("gateway").ClientConfig("registry")
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient("xds:///registry", grpc.WithResolvers(builder),
		grpc.WithTransportCredentials(credentials.NewTLS(tls)))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	w.server.set("registry", slices.Clone(w.replicas))
	becomes(t, conn, w.replicas...)
	w.server.set("registry", slices.Clone(w.replicas[:1]))
	becomes(t, conn, w.replicas[0])
}

// innerCredentials are the credentials of the channel to the xDS server.
type innerCredentials struct{ id rpc.TLS }

func (innerCredentials) Name() string { return "inner" }

func (c innerCredentials) Build(json.RawMessage) (credentials.Bundle, func(), error) {
	conf, err := c.id.ClientConfig("xds")
	return bundle{credentials.NewTLS(conf)}, func() {}, err
}

type bundle struct {
	own credentials.TransportCredentials
}

func (b bundle) TransportCredentials() credentials.TransportCredentials { return b.own }
func (bundle) PerRPCCredentials() credentials.PerRPCCredentials         { return nil }
func (b bundle) NewWithMode(string) (credentials.Bundle, error)         { return b, nil }

// A server without replicas of one service publishes the others, because the missing service may wait for them.
func TestStatePage(t *testing.T) {
	w := &fixture{id: identities(t)}
	replica := Replica{Address: serve(t, "registry", w.id("registry"), "127.0.0.1:0", nil)}
	w.address = fmt.Sprintf("127.0.0.1:%d", porttest.FreePort(t))
	file := filepath.Join(t.TempDir(), "replicas.yaml")
	if err := os.WriteFile(file, fmt.Appendf(nil, "registry: [%q]\n", replica.Address), 0o600); err != nil {
		t.Fatal(err)
	}
	c := &Config{
		ID:        w.id("xds"),
		Address:   w.address,
		File:      file,
		DNS:       map[string]string{"watchfanout": "nobody.invalid:1"},
		DNSPeriod: time.Second,
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- c.run(ctx) }()
	becomes(t, w.client(t, rpc.XDSConfig{}), replica)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

// A client leaves a server without replicas for a server with replicas. An invalid or old cache does not prevent calls
// to the addresses of the flags.
func TestEmptyServersAndStaleCaches(t *testing.T) {
	w := newFixture(t, 1)
	empty := newServer("")
	ignorant := serve(t, "xds", w.id("xds"), "127.0.0.1:0",
		func(ctx context.Context, s *rpc.Server) { empty.register(ctx, s) })
	w.server.set("registry", slices.Clone(w.replicas))
	for range 4 {
		becomes(t, w.client(t, rpc.XDSConfig{Servers: []string{ignorant, w.address}}), w.replicas[0])
	}
	for _, cached := range []string{"\x00\x00\x00", "nonsense", "127.0.0.1:1\n", ""} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "registry"), []byte(cached), 0o600); err != nil {
			t.Fatal(err)
		}
		becomes(t, w.client(t, rpc.XDSConfig{
			Servers:  []string{"127.0.0.1:1"},
			Dir:      dir,
			Fallback: map[string][]string{"registry": {w.replicas[0].Address}},
		}), w.replicas[0])
	}
}

// loadBalancer returns an address whose connections go to the servers in turn.
func loadBalancer(t *testing.T, servers ...string) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for n := 0; ; n++ {
			client, err := l.Accept()
			if err != nil {
				return
			}
			server, err := net.Dial("tcp", servers[n%len(servers)])
			if err != nil {
				client.Close()
				continue
			}
			go func() { _, _ = io.Copy(server, client); server.Close() }()
			go func() { _, _ = io.Copy(client, server); client.Close() }()
		}
	}()
	return l.Addr().String()
}

// Behind a load balancer, a client leaves a server without replicas, and a server that stops serving.
func TestClientsLeaveAServerBehindALoadBalancer(t *testing.T) {
	w := newFixture(t, 2)
	empty, stale := newServer(""), newServer("")
	var staleServer *rpc.Server
	emptyAddress := serve(t, "xds", w.id("xds"), "127.0.0.1:0",
		func(ctx context.Context, s *rpc.Server) { empty.register(ctx, s) })
	staleAddress := serve(t, "xds", w.id("xds"), "127.0.0.1:0",
		func(ctx context.Context, s *rpc.Server) { stale.register(ctx, s); staleServer = s })
	stale.set("registry", slices.Clone(w.replicas[:1]))
	w.server.set("registry", slices.Clone(w.replicas))
	address := loadBalancer(t, emptyAddress, staleAddress, staleAddress, w.address)
	conn := w.client(t, rpc.XDSConfig{Servers: []string{address}})
	becomes(t, conn, w.replicas[0])
	staleServer.SetReady("xds", false) // the next connection goes to it, too
	becomes(t, conn, w.replicas...)
}

// A call costs the same with replicas from addresses and with replicas from an xDS server.
func BenchmarkHop(b *testing.B) {
	w := newFixture(b, 1)
	w.server.set("registry", slices.Clone(w.replicas))
	direct, err := rpc.Dial(w.id("gateway"), "registry", rpc.Addresses{w.replicas[0].Address})
	if err != nil {
		b.Fatal(err)
	}
	defer direct.Close()
	found := w.client(b, rpc.XDSConfig{})
	for name, conn := range map[string]*grpc.ClientConn{"addresses": direct, "xds": found} {
		client := healthv1.NewHealthClient(conn)
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := client.Check(b.Context(), &healthv1.HealthCheckRequest{}); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
