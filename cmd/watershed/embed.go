package main

import (
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"watershed.dev/platform/config"
	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
)

// etcdSettings say where the embedded etcd keeps its data and listens: on a unix socket, or with mutual TLS.
type etcdSettings struct {
	dir, listen string
	metrics     string
	id          rpc.TLS
	// name, peer and initialCluster make it a member among several.
	name, peer, initialCluster string
}

// startEtcd runs one member. Stop it with Close.
func startEtcd(s etcdSettings) (*embed.Etcd, error) {
	c := embed.NewConfig()
	c.Name, c.Dir = cmp.Or(s.name, "watershed"), s.dir
	listen, err := url.Parse(s.listen)
	if err != nil {
		return nil, fmt.Errorf("--listen-client-urls %q: %w", s.listen, err)
	}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{*listen}, []url.URL{*listen}
	if listen.Scheme == "unix" {
		// No socket may be advertised, and nobody asks.
		c.AdvertiseClientUrls = []url.URL{{Scheme: "http", Host: "localhost:1"}}
	}
	if err := s.peers(c); err != nil {
		return nil, err
	}
	c.QuotaBackendBytes = 8 << 30
	c.MaxRequestBytes = 3 << 20
	if s.metrics != "" {
		m, err := url.Parse(s.metrics)
		if err != nil {
			return nil, fmt.Errorf("--listen-metrics-urls %q: %w", s.metrics, err)
		}
		c.ListenMetricsUrls = []url.URL{*m}
	}
	if listen.Scheme == "https" {
		c.ClientTLSInfo = transport.TLSInfo{
			CertFile:       s.id.CertFile,
			KeyFile:        s.id.KeyFile,
			TrustedCAFile:  s.id.CAFile,
			ClientCertAuth: true,
			AllowedCNs:     []string{"registry"},
		}
	}
	c.EnableGRPCGateway = false
	c.LogLevel = "warn"
	console := zapcore.NewConsoleEncoder(zap.NewProductionEncoderConfig())
	errorsOnly := zapcore.NewCore(console, zapcore.AddSync(os.Stderr), zapcore.ErrorLevel)
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(errorsOnly))
	return embed.StartEtcd(c)
}

// peers makes it a member of a cluster, or the only one.
func (s *etcdSettings) peers(c *embed.Config) error {
	if s.peer == "" {
		listen, _ := url.Parse("unix://" + filepath.Join(socketDir(s.dir), "peer.sock"))
		advertised, _ := url.Parse("http://localhost:1") // a single member has no peer to be found by
		c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{*listen}, []url.URL{*advertised}
		c.InitialCluster = c.Name + "=" + advertised.String()
		return nil
	}
	peer, err := url.Parse(s.peer)
	if err != nil {
		return fmt.Errorf("--listen-peer-urls %q: %w", s.peer, err)
	}
	c.ListenPeerUrls, c.AdvertisePeerUrls = []url.URL{*peer}, []url.URL{*peer}
	c.InitialCluster = s.initialCluster
	c.PeerTLSInfo = transport.TLSInfo{
		CertFile:       s.id.CertFile,
		KeyFile:        s.id.KeyFile,
		TrustedCAFile:  s.id.CAFile,
		ClientCertAuth: true,
		AllowedCNs:     []string{"etcd"},
	}
	return nil
}

// socketDir is where sockets for dir go: in it, or in a short place where its path is too long for a socket.
func socketDir(dir string) string {
	if len(dir) < 80 {
		return dir
	}
	root := os.Getenv("XDG_RUNTIME_DIR")
	if root == "" {
		root = filepath.Join(os.TempDir(), fmt.Sprintf("watershed-%d", os.Geteuid()))
	}
	sum := sha256.Sum256([]byte(dir))
	short := filepath.Join(root, fmt.Sprintf("watershed-%x", sum[:8]))
	err := os.MkdirAll(short, 0o700)
	for _, d := range []string{root, short} { // in a place where anybody may make directories, ours must be ours
		if err == nil {
			err = ownDirectory(d)
		}
	}
	if err != nil {
		fatal("--data-dir %q is too long for sockets, and the place for them, %q, is not safe: %v; choose a shorter one",
			dir, short, err)
	}
	return short
}

// fatal ends the process with one line.
func fatal(format string, args ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", args...)
	os.Exit(1)
}

// etcdCommand runs etcd in a process of its own.
func etcdCommand(args []string) error {
	fs := pflag.NewFlagSet("watershed etcd", pflag.ContinueOnError)
	var s etcdSettings
	fs.StringVar(&s.dir, "data-dir", "", "Where etcd keeps its data.")
	fs.StringVar(&s.listen, "listen-client-urls", "https://127.0.0.1:2379", "The URL to serve clients on.")
	fs.StringVar(&s.metrics, "listen-metrics-urls", "", "A URL to serve /metrics on without TLS. Loopback only.")
	fs.StringVar(&s.name, "name", "watershed", "This member's name among those of --initial-cluster.")
	fs.StringVar(&s.peer, "listen-peer-urls", "",
		"The https URL to serve and be found by other members on. Empty: it is the only one.")
	fs.StringVar(&s.initialCluster, "initial-cluster", "", "Every member's name and peer URL: a=https://host:2380,b=….")
	s.id.AddFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return help(err)
	}
	return runAlone(etcdPart(s))
}

// runAlone runs a part as a process of its own.
func runAlone(p lifecycle.Part) error {
	ctx, cancel := lifecycle.Signalled()
	defer cancel()
	return lifecycle.Run(ctx, []lifecycle.Part{p}, nil, nil)
}

// natsSettings say where the embedded NATS keeps the log and, unless it serves this process alone, listens.
type natsSettings struct {
	dir     string
	keyFile string
	address string
	id      rpc.TLS
	// name, cluster and routes make it one of several servers.
	name, cluster string
	routes        []string
}

// natsUsers are who may do what: registry alone writes the log, watchfanout reads it and may ask the publisher how far
// it is, and what somebody is answered no other may see or forge. Anything that is not here is refused.
func natsUsers() []*natsserver.User {
	const api = "$JS.API."
	user := func(name string, publish, subscribe []string) *natsserver.User {
		return &natsserver.User{Username: "CN=" + name, Permissions: &natsserver.Permissions{
			Publish:   &natsserver.SubjectPermission{Allow: publish},
			Subscribe: &natsserver.SubjectPermission{Allow: append(subscribe, eventlog.Inbox(name)+".>")},
		}}
	}
	consumer := api + "CONSUMER.CREATE." + eventlog.StreamName
	read := []string{
		api + "STREAM.INFO." + eventlog.StreamName,
		api + "STREAM.MSG.GET." + eventlog.StreamName,
		consumer + ".*",
		api + "CONSUMER.DELETE." + eventlog.StreamName + ".*", // names are random, and nobody may list them
		api + "CONSUMER.MSG.NEXT." + eventlog.StreamName + ".*",
		eventlog.AskProgress,
	}
	write := append(slices.Clone(read),
		api+"STREAM.CREATE."+eventlog.StreamName,
		api+"STREAM.UPDATE."+eventlog.StreamName,
		eventlog.Subject(">"),
		eventlog.ProgressSubject,
	)
	return []*natsserver.User{user("registry", write, []string{eventlog.AskProgress}), user("watchfanout", read, nil)}
}

// startNATS runs a server with JetStream, which encrypts what it stores. Stop it with Shutdown.
func startNATS(s natsSettings) (*natsserver.Server, error) {
	o := &natsserver.Options{
		ServerName:         cmp.Or(s.name, "watershed"),
		JetStream:          true,
		StoreDir:           s.dir,
		MaxPayload:         32 << 20,
		NoSigs:             true,
		NoLog:              true,
		MaxPending:         256 << 20,
		JetStreamMaxMemory: 1 << 30,
		JetStreamMaxStore:  16 << 30,
		DontListen:         s.address == "",
		WriteDeadline:      10 * time.Second,
	}
	if s.keyFile != "" {
		key, err := os.ReadFile(s.keyFile)
		if err != nil {
			return nil, fmt.Errorf("--jetstream-key-file: %w", err)
		}
		if o.JetStreamKey = strings.TrimSpace(string(key)); len(o.JetStreamKey) < 32 {
			return nil, fmt.Errorf("--jetstream-key-file %q: want a key of 32 characters at least", s.keyFile)
		}
	}
	if s.address != "" {
		host, port, ok := strings.Cut(s.address, ":")
		n, err := strconv.Atoi(port)
		if !ok || err != nil {
			return nil, fmt.Errorf("--listen-address %q: want host:port", s.address)
		}
		o.Host, o.Port = host, n
		conf, err := s.id.ServerConfig()
		if err != nil {
			return nil, err
		}
		o.TLS, o.TLSVerify, o.TLSMap, o.TLSConfig, o.TLSTimeout = true, true, true, conf, 5
		o.Users = natsUsers()
	}
	if s.cluster != "" {
		if err := s.join(o); err != nil {
			return nil, err
		}
	}
	srv, err := natsserver.NewServer(o)
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

// join makes it one server of a cluster.
func (s *natsSettings) join(o *natsserver.Options) error {
	host, port, ok := strings.Cut(s.cluster, ":")
	n, err := strconv.Atoi(port)
	if !ok || err != nil {
		return fmt.Errorf("--cluster-listen-address %q: want host:port", s.cluster)
	}
	// A server is whoever has the identity of one: no other service may pass for it. What it calls, and what calls it,
	// is one.
	conf, err := s.id.ServerConfig()
	if err != nil {
		return err
	}
	client, err := s.id.ClientConfig("nats")
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
	o.Cluster = natsserver.ClusterOpts{
		Name:           "watershed",
		Host:           host,
		Port:           n,
		TLSConfig:      conf,
		TLSTimeout:     5,
		ConnectRetries: 1 << 30,
	}
	for _, r := range s.routes {
		u, err := url.Parse("nats-route://" + r)
		if err != nil {
			return fmt.Errorf("--cluster-routes %q: %w", r, err)
		}
		o.Routes = append(o.Routes, u)
	}
	return nil
}

// natsCommand runs NATS in a process of its own.
func natsCommand(args []string) error {
	fs := pflag.NewFlagSet("watershed nats", pflag.ContinueOnError)
	var s natsSettings
	fs.StringVar(&s.dir, "data-dir", "", "Where JetStream keeps its data.")
	fs.StringVar(&s.keyFile, "jetstream-key-file", "",
		"A file with the key that what JetStream stores is encrypted with. Empty: it is not encrypted.")
	fs.StringVar(&s.address, "listen-address", "127.0.0.1:4222", "host:port to serve clients on.")
	fs.StringVar(&s.name, "name", "watershed", "This server's name in its cluster.")
	fs.StringVar(&s.cluster, "cluster-listen-address", "",
		"host:port to serve the other servers of a cluster on. Empty: it is the only one.")
	fs.StringSliceVar(&s.routes, "cluster-routes", nil, "host:port of the cluster's servers, comma separated.")
	s.id.AddFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return help(err)
	}
	return runAlone(natsPart(s, func(*natsserver.Server) {}))
}

// natsPart runs the embedded NATS as a part of a process; started is told of the server before the part is ready.
func natsPart(s natsSettings, started func(*natsserver.Server)) lifecycle.Part {
	ready := starting("nats")
	return lifecycle.Part{Name: "nats", Ready: ready, Run: func(ctx context.Context) error {
		srv, err := startNATS(s)
		if err != nil {
			return err
		}
		started(srv)
		ready.Set("nats", nil)
		<-ctx.Done()
		srv.Shutdown()
		srv.WaitForShutdown()
		return nil
	}}
}

// etcdPart runs the embedded etcd as a part of a process.
func etcdPart(s etcdSettings) lifecycle.Part {
	ready := starting("etcd")
	return lifecycle.Part{Name: "etcd", Ready: ready, Run: func(ctx context.Context) error {
		if err := os.MkdirAll(s.dir, 0o700); err != nil {
			return err
		}
		e, err := startEtcd(s)
		if err != nil {
			return err
		}
		defer e.Close()
		select {
		case <-e.Server.ReadyNotify():
			ready.Set("etcd", nil)
		case err := <-e.Err():
			return err
		case <-ctx.Done():
			return nil
		}
		select {
		case err := <-e.Err():
			return err
		case <-ctx.Done():
			return nil
		}
	}}
}

// starting is a readiness that waits for one thing.
func starting(what string) *lifecycle.Readiness {
	r := &lifecycle.Readiness{}
	r.Set(what, errors.New("it is starting"))
	return r
}
