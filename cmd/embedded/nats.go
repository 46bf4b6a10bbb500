package embedded

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/spf13/pflag"
	"golang.org/x/net/netutil"

	"watershed.dev/platform/config"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
)

// NATS is a NATS server with JetStream, which holds the event log.
type NATS struct {
	// Dir is where JetStream keeps what it stores, and KeyFile holds the key that encrypts it; with KeyFile empty it is
	// not encrypted.
	Dir, KeyFile string
	// Address is the host:port that it serves clients on, by mutual TLS; empty: it serves this process alone.
	Address string
	// Monitor is the host:port to serve /healthz on without TLS; empty: none.
	Monitor string
	// ID is its identity on the inner network.
	ID rpc.TLS
	// Name, Cluster (a host:port) and Routes make it one of several servers; with Cluster empty it is the only one.
	Name, Cluster string
	Routes        []string
}

// Bounds of what JetStream may store, of one message, and of what may wait for one client.
const (
	maxMemoryBytes  = 1 << 30
	maxStoreBytes   = 16 << 30
	maxPayloadBytes = 32 << 20
	maxPendingBytes = 256 << 20

	maxMonitorConnections = 64
)

// AddFlags adds the server's flags, with their defaults.
func (n *NATS) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&n.Dir, "data-dir", "", "Where JetStream keeps its data.")
	fs.StringVar(&n.KeyFile, "jetstream-key-file", "",
		"A file with the key that what JetStream stores is encrypted with. Empty: it is not encrypted.")
	fs.StringVar(&n.Address, "listen-address", "127.0.0.1:4222", "host:port to serve clients on.")
	fs.StringVar(&n.Monitor, "monitor-address", "",
		"host:port to serve /healthz on without TLS, and nothing else. Empty: none.")
	fs.StringVar(&n.Name, "name", "watershed", "This server's name in its cluster.")
	fs.StringVar(&n.Cluster, "cluster-listen-address", "",
		"host:port to serve the other servers of a cluster on. Empty: it is the only one.")
	fs.StringSliceVar(&n.Routes, "cluster-routes", nil, "host:port of the cluster's servers, comma separated.")
	n.ID.AddFlags(fs)
}

// NATSCommand runs a server in a process of its own until it is told to stop.
func NATSCommand(command string, args []string) error {
	fs := pflag.NewFlagSet(command, pflag.ContinueOnError)
	var n NATS
	n.AddFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return process.ExitOnHelp(err)
	}
	return runStandalone(n.Runner(func(*server.Server) {}))
}

// Runner runs the server as a part of a process; started is told of it before the part is ready.
func (n *NATS) Runner(onStarted func(*server.Server)) lifecycle.Runner {
	ready := lifecycle.NotReady("nats")
	return lifecycle.Runner{Name: "nats", Ready: ready, Run: func(ctx context.Context) error {
		srv, err := n.start()
		if err != nil {
			return err
		}
		if err := n.monitor(ctx, srv); err != nil {
			return err
		}
		onStarted(srv)
		ready.Set("nats", nil)
		<-ctx.Done()
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil
	}}
}

// start runs the server. Stop it with Shutdown.
func (n *NATS) start() (*server.Server, error) {
	o := &server.Options{
		ServerName:         cmp.Or(n.Name, "watershed"),
		JetStream:          true,
		StoreDir:           n.Dir,
		MaxPayload:         maxPayloadBytes,
		NoSigs:             true,
		NoLog:              true,
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
	srv, err := server.NewServer(o)
	if err != nil {
		return nil, err
	}
	srv.Start()
	if !srv.ReadyForConnections(20 * time.Second) {
		srv.Shutdown()
		return nil, errors.New("NATS does not become ready")
	}
	return srv, nil
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
		return fmt.Errorf("--jetstream-key-file %q: want a key of 32 characters at least", n.KeyFile)
	}
	return nil
}

// listen has it serve those whose certificates the allow lists name.
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

// monitor says whether the server serves until ctx is done. NATS' own monitoring tells anybody who its clients are and
// what its goroutines do.
func (n *NATS) monitor(ctx context.Context, srv *server.Server) error {
	if n.Monitor == "" {
		return nil
	}
	l, err := net.Listen("tcp", n.Monitor)
	if err != nil {
		return fmt.Errorf("--monitor-address %q: %w", n.Monitor, err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) {
		if !srv.Running() || !srv.JetStreamEnabled() {
			http.Error(w, "it is not running, or JetStream is not", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprint(w, "ok")
	})
	pages := &http.Server{Handler: mux, ReadHeaderTimeout: time.Second, ReadTimeout: 5 * time.Second}
	pages.SetKeepAlivesEnabled(false)
	context.AfterFunc(ctx, func() { pages.Close() })
	go func() { _ = pages.Serve(netutil.LimitListener(l, maxMonitorConnections)) }()
	return nil
}

// join makes it one server of a cluster.
func (n *NATS) join(o *server.Options) error {
	if n.Cluster == "" {
		return nil
	}
	host, port, err := hostPort("cluster-listen-address", n.Cluster)
	if err != nil {
		return err
	}
	// A server is whoever has the identity of one: no other service may pass for it. What it calls, and what calls it,
	// is one.
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
			return errors.New("it is not a NATS server")
		}
		return errors.Join(verify(c), client.VerifyConnection(c)) // its certificate is good for both sides of a route
	}
	o.Cluster = server.ClusterOpts{
		Name:           "watershed",
		Host:           host,
		Port:           port,
		TLSConfig:      conf,
		TLSTimeout:     5,
		ConnectRetries: 1 << 30,
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
