package embedded

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/spf13/pflag"
	"golang.org/x/net/netutil"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
)

// NATS is a NATS server with JetStream, which stores the event log.
type NATS struct {
	// Dir is the directory of JetStream's storage. KeyFile holds the key that encrypts it. Empty KeyFile: no
	// encryption.
	Dir, KeyFile string
	// Address is the host:port for clients, with mutual TLS. Empty: the server serves only this process.
	Address string
	// Monitor is the host:port that serves /healthz, /readyz and /metrics without TLS. Empty: none.
	Monitor string
	// ID is the server's identity on the inner network.
	ID rpc.TLS
	// Name, Cluster (a host:port) and Routes make it a server of a cluster. With Cluster empty it is the only server.
	// Advertise is the host:port that the server advertises to the others. Empty: its own address with Cluster's port.
	Name, Cluster, Advertise string
	Routes                   []string

	// program, if set, is the process's report, which registry reads by NATS.
	program *process.Program
	// running is the server that runs, or the last that ran.
	running atomic.Pointer[server.Server]
	// routeClosed has a value after a route to another server has closed.
	routeClosed chan struct{}
}

// Bounds of JetStream's storage, of one message, of the pending data of one client, and of monitor connections.
const (
	maxMemoryBytes  = 1 << 30
	maxStoreBytes   = 16 << 30
	maxPayloadBytes = 32 << 20
	maxPendingBytes = 256 << 20

	maxMonitorConnections = 64
)

// A server closes the routes to a server that does not respond after routePingInterval and maxRoutePings intervals
// more, at most. The routes of a lost host otherwise stay open for 60 to 90 s. A response may wait behind a copy of the
// log.
const (
	routePingInterval = 2 * time.Second
	maxRoutePings     = 4
)

// CheckLogs returns an error if the server cannot reserve the bytes of --log-max-bytes for a number of event logs.
// storage is the value of --log-storage.
func CheckLogs(storage string, bytes int64, number int) error {
	most := int64(maxStoreBytes)
	if storage == "memory" {
		most = maxMemoryBytes
	}
	if most /= int64(number); bytes > most {
		return fmt.Errorf("--log-max-bytes=%d: want at most %d: NATS reserves the bytes for each event log (%d) in %s "+
			"(--log-storage)", bytes, most, number, storage)
	}
	return nil
}

// AddFlags registers the server's flags with their defaults.
func (n *NATS) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&n.Dir, "data-dir", "", "The storage directory of JetStream.")
	fs.StringVar(&n.KeyFile, "jetstream-key-file", "",
		"The file of the key that encrypts the storage of JetStream. Empty: no encryption.")
	fs.StringVar(&n.Address, "listen-address", "127.0.0.1:4222", "The host:port to listen on for clients.")
	fs.StringVar(&n.Monitor, "monitor-address", "",
		"The host:port that serves only /healthz, /readyz and /metrics, without TLS. /metrics has the validity of the "+
			"certificate. Empty: none.")
	fs.StringVar(&n.Name, "name", "watershed", "The name of this server in its cluster.")
	fs.StringVar(&n.Cluster, "cluster-listen-address", "",
		"The host:port to listen on for other servers. Empty: a cluster of one server.")
	fs.StringVar(&n.Advertise, "cluster-advertise", "",
		"The host:port that this server advertises to the other servers. Empty: its own address with the port of "+
			"--cluster-listen-address.")
	fs.StringSliceVar(&n.Routes, "cluster-routes", nil, "The host:port of each server of the cluster, comma separated.")
	n.ID.AddFlags(fs)
}

// NATSCommand runs a server in its own process until a signal stops it.
func NATSCommand(fs *pflag.FlagSet) func() error {
	var n NATS
	n.AddFlags(fs)
	r := n.Runner()
	run := runStandalone(fs, r)
	return func() error {
		n.program = &process.Program{Name: r.Name, Address: n.Address, ID: &n.ID, Flags: fs, NotReady: n.notReady}
		return run()
	}
}

// notReady returns why the server has no complete copy of the streams, or nil.
func (n *NATS) notReady() error {
	if reason := notReady(n.running.Load()); reason != "" {
		return errors.New(reason)
	}
	return nil
}

// serveReport responds to registry's requests for the report until ctx is done. The server's client connects again
// after each restart of the server.
func (n *NATS) serveReport(ctx context.Context) error {
	if n.program == nil || n.Address == "" {
		return nil
	}
	own := eventlog.Options{URL: "tls://" + n.Address}
	nc, err := own.Connect(n.program.Name, n.ID)
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, nc.Close)
	return eventlog.ServeReport(nc, func() ([]byte, error) {
		return json.Marshal(n.program.Report(ctx, process.Shallow))
	})
}

// InProcessConn connects to the server within the process (nats.InProcessConnProvider).
func (n *NATS) InProcessConn() (net.Conn, error) {
	srv := n.running.Load()
	if srv == nil {
		return nil, errors.New("NATS has not started")
	}
	return srv.InProcessConn()
}

// Runner returns a runner of the server. After an error of the disk, it restarts the server when the directory accepts
// writes again.
func (n *NATS) Runner() lifecycle.Runner {
	ready := lifecycle.NotReady("nats")
	return lifecycle.Runner{Name: "nats", Ready: ready, Run: func(ctx context.Context) error {
		if n.Dir == "" {
			return errors.New("--data-dir is required")
		}
		store, err := openStore(n.Dir)
		if err != nil {
			return err
		}
		defer store.Close()
		if err := n.checkFree(); err != nil {
			return err
		}
		n.routeClosed = make(chan struct{}, 1)
		srv, err := n.startOnDisk(ctx, ready)
		if err != nil {
			return err
		}
		n.running.Store(srv)
		if err := errors.Join(n.monitor(ctx), n.serveReport(ctx)); err != nil {
			return err
		}
		ready.Set("nats", nil)
		var campaigns sync.WaitGroup
		campaigns.Go(func() { n.campaignForLost(ctx) })
		n.restartAfterWriteErrors(ctx)
		campaigns.Wait()
		srv = n.running.Load()
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil
	}}
}

// start starts the server. The caller stops it with Shutdown.
func (n *NATS) start() (*server.Server, error) {
	o := &server.Options{
		ServerName:         cmp.Or(n.Name, "watershed"),
		JetStream:          true,
		StoreDir:           n.Dir,
		MaxPayload:         maxPayloadBytes,
		NoSigs:             true,
		MaxPending:         maxPendingBytes,
		JetStreamMaxMemory: maxMemoryBytes,
		JetStreamMaxStore:  maxStoreBytes,
		DontListen:         n.Address == "",
		WriteDeadline:      10 * time.Second,
	}
	for _, set := range []func(*server.Options) error{n.encrypt, n.listen, n.join} {
		if err := set(o); err != nil {
			return nil, err
		}
	}
	if err := n.removeDamaged(o.JetStreamKey); err != nil {
		return nil, err
	}
	srv, err := server.NewServer(o)
	if err != nil {
		return nil, err
	}
	fatal := make(chan error, 1)
	srv.SetLoggerV2(natsLog{n.routeClosed, fatal}, false, false, false)
	srv.Start()
	// The second call does not count the time while the process was stopped.
	if len(fatal) > 0 || !srv.ReadyForConnections(20*time.Second) && !srv.ReadyForConnections(time.Second) {
		srv.Shutdown()
		select {
		case err := <-fatal:
			return nil, err
		default:
			return nil, errors.New("NATS is not ready after 20 s")
		}
	}
	return srv, nil
}

// checkFree returns an error if another process has a port of the server.
func (n *NATS) checkFree() error {
	return cmp.Or(checkFree("listen-address", n.Address, n.Address),
		checkFree("cluster-listen-address", n.Cluster, n.Cluster),
		checkFree("monitor-address", n.Monitor, n.Monitor))
}

func (n *NATS) encrypt(o *server.Options) error {
	if n.KeyFile == "" {
		return nil
	}
	key, err := os.ReadFile(n.KeyFile)
	if err != nil {
		return fmt.Errorf("--jetstream-key-file: %w", err)
	}
	if o.JetStreamKey = strings.TrimSpace(string(key)); len(o.JetStreamKey) < 32 {
		return fmt.Errorf("--jetstream-key-file %q: want a key of at least 32 characters", n.KeyFile)
	}
	return nil
}

// listen configures the listener for clients. accounts.conf names the accepted certificates.
func (n *NATS) listen(o *server.Options) (err error) {
	if n.Address == "" {
		return nil
	}
	if o.Host, o.Port, err = hostPort("listen-address", n.Address); err != nil {
		return err
	}
	conf, err := n.ID.ServerConfig()
	o.TLS, o.TLSVerify, o.TLSMap, o.TLSConfig, o.TLSTimeout = true, true, true, conf, 5
	return errors.Join(err, o.ProcessConfigString(natsAccounts))
}

// monitor serves the monitoring pages until ctx is done.
func (n *NATS) monitor(ctx context.Context) error {
	if n.Monitor == "" {
		return nil
	}
	l, err := net.Listen("tcp", n.Monitor)
	if err != nil {
		return fmt.Errorf("--monitor-address %q: %w", n.Monitor, err)
	}
	pages := &http.Server{Handler: n.monitorPages(), ReadHeaderTimeout: time.Second, ReadTimeout: 5 * time.Second}
	pages.SetKeepAlivesEnabled(false)
	context.AfterFunc(ctx, func() { pages.Close() })
	go func() { _ = pages.Serve(netutil.LimitListener(l, maxMonitorConnections)) }()
	return nil
}

// monitorPages returns /healthz, /readyz, and /metrics with the validity of the server's certificate. They replace
// NATS' own monitoring, which shows the clients and goroutines of the server to every reader.
func (n *NATS) monitorPages() http.Handler {
	mux := http.NewServeMux()
	for path, reasonOf := range map[string]func(*server.Server) string{"/healthz": notHealthy, "/readyz": notReady} {
		mux.HandleFunc(path, func(w http.ResponseWriter, _ *http.Request) {
			if reason := reasonOf(n.running.Load()); reason != "" {
				http.Error(w, reason, http.StatusServiceUnavailable)
				return
			}
			fmt.Fprint(w, "ok")
		})
	}
	metrics := prometheus.NewRegistry()
	metrics.MustRegister(process.Expirations(&n.ID))
	mux.Handle("/metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{MaxRequestsInFlight: 2}))
	return mux
}

// notHealthy returns that the server or its JetStream does not run, or an empty string.
func notHealthy(srv *server.Server) string {
	if !srv.Running() || !srv.JetStreamEnabled() {
		return "the NATS server or its JetStream does not run"
	}
	return ""
}

// notReady returns why the server has no complete copy of the streams, or an empty string. It ignores consumers: they
// have a single copy, and their readers create them again.
func notReady(srv *server.Server) string {
	for _, e := range srv.Healthz(&server.HealthzOptions{Details: true}).Errors {
		if e.Type != server.HealthzErrorConsumer {
			return strings.TrimSpace(e.Stream + " " + e.Error)
		}
	}
	return ""
}

// join configures the server as a member of a cluster.
func (n *NATS) join(o *server.Options) error {
	if n.Cluster == "" {
		return nil
	}
	host, port, err := hostPort("cluster-listen-address", n.Cluster)
	if err != nil {
		return err
	}
	// Both sides of a route must have the identity "nats", so no other service can act as a server.
	conf, err := n.ID.ServerConfig()
	if err != nil {
		return err
	}
	client, err := n.ID.ClientConfig("nats")
	if err != nil {
		return err
	}
	conf.ServerName, conf.InsecureSkipVerify = client.ServerName, true
	conf.GetClientCertificate = client.GetClientCertificate
	verify := conf.VerifyConnection
	conf.VerifyConnection = func(c tls.ConnectionState) error {
		if len(c.PeerCertificates) == 0 || c.PeerCertificates[0].Subject.CommonName != "nats" {
			return errors.New("the peer is not a NATS server")
		}
		return errors.Join(verify(c), client.VerifyConnection(c)) // valid for both sides of a route
	}
	// NATS retries the configured routes without a limit. ConnectRetries is 0, so that NATS does not also retry the
	// addresses that other servers advertise: a replaced server may have left its address for ever.
	o.Cluster = server.ClusterOpts{
		Name:         "watershed",
		Host:         host,
		Port:         port,
		Advertise:    n.Advertise,
		TLSConfig:    conf,
		TLSTimeout:   5,
		PingInterval: routePingInterval,
		MaxPingsOut:  maxRoutePings,
	}
	if n.Advertise != "" {
		if _, _, err := hostPort("cluster-advertise", n.Advertise); err != nil {
			return err
		}
	}
	for _, r := range n.Routes {
		u, err := url.Parse("nats-route://" + r)
		if err != nil {
			return fmt.Errorf("--cluster-routes %q: %w", r, err)
		}
		o.Routes = append(o.Routes, u)
	}
	return nil
}

func hostPort(flag, value string) (host string, port int, err error) {
	host, p, err := net.SplitHostPort(value)
	if err == nil {
		port, err = strconv.Atoi(p)
	}
	if err != nil {
		return "", 0, fmt.Errorf("--%s %q: want host:port", flag, value)
	}
	return host, port, nil
}
