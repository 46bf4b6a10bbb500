package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
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
	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/rpc"
)

// etcdSettings say where the embedded etcd keeps its data and listens: on a unix socket, or with mutual TLS.
type etcdSettings struct {
	dir, listen string
	metrics     string
	id          rpc.TLS
}

// startEtcd runs one member. Stop it with Close.
func startEtcd(s etcdSettings) (*embed.Etcd, error) {
	c := embed.NewConfig()
	c.Name, c.Dir = "watershed", s.dir
	listen, err := url.Parse(s.listen)
	if err != nil {
		return nil, fmt.Errorf("--listen-client-urls %q: %w", s.listen, err)
	}
	c.ListenClientUrls, c.AdvertiseClientUrls = []url.URL{*listen}, []url.URL{*listen}
	if listen.Scheme == "unix" {
		c.AdvertiseClientUrls = []url.URL{{Scheme: "http", Host: "localhost:1"}} // no socket may be advertised, and nobody asks
	}
	peer, _ := url.Parse("unix://" + filepath.Join(socketDir(s.dir), "peer.sock"))
	c.ListenPeerUrls = []url.URL{*peer}
	advertised, _ := url.Parse("http://localhost:1") // a single member has no peer to be found by
	c.AdvertisePeerUrls = []url.URL{*advertised}
	c.InitialCluster = c.Name + "=" + advertised.String()
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
		c.ClientTLSInfo = transport.TLSInfo{CertFile: s.id.CertFile, KeyFile: s.id.KeyFile, TrustedCAFile: s.id.CAFile, ClientCertAuth: true,
			AllowedCNs: []string{"registry"}} // registry alone
	}
	c.EnableGRPCGateway = false
	c.LogLevel = "warn"
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(zap.NewProductionEncoderConfig()), zapcore.AddSync(os.Stderr), zapcore.ErrorLevel)))
	return embed.StartEtcd(c)
}

// socketDir is where sockets for dir go: in it, or in a short place where its path is too long for a socket.
func socketDir(dir string) string {
	if len(dir) < 80 {
		return dir
	}
	short := filepath.Join(os.TempDir(), fmt.Sprintf("watershed-%x", hash(dir)))
	_ = os.MkdirAll(short, 0o700)
	return short
}

func hash(s string) uint32 {
	h := uint32(2166136261)
	for i := range len(s) {
		h = (h ^ uint32(s[i])) * 16777619
	}
	return h
}

// etcdCommand runs etcd in a process of its own.
func etcdCommand(args []string) error {
	fs := pflag.NewFlagSet("watershed etcd", pflag.ContinueOnError)
	var s etcdSettings
	fs.StringVar(&s.dir, "data-dir", "", "Where etcd keeps its data.")
	fs.StringVar(&s.listen, "listen-client-urls", "https://127.0.0.1:2379", "The URL to serve clients on.")
	fs.StringVar(&s.metrics, "listen-metrics-urls", "", "A URL to serve /metrics on without TLS. Loopback only.")
	s.id.AddFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return help(err)
	}
	ctx, cancel := lifecycle.Signalled()
	defer cancel()
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	e, err := startEtcd(s)
	if err != nil {
		return err
	}
	defer e.Close()
	select {
	case err := <-e.Err():
		return err
	case <-ctx.Done():
		return nil
	}
}

// natsSettings say where the embedded NATS keeps the log and, unless it serves this process alone, listens.
type natsSettings struct {
	dir     string
	address string
	id      rpc.TLS
}

// startNATS runs a server with JetStream. Stop it with Shutdown.
func startNATS(s natsSettings) (*natsserver.Server, error) {
	o := &natsserver.Options{ServerName: "watershed", JetStream: true, StoreDir: s.dir, MaxPayload: 32 << 20, NoSigs: true, NoLog: true,
		MaxPending: 256 << 20, JetStreamMaxMemory: 1 << 30, JetStreamMaxStore: 16 << 30, DontListen: s.address == "", WriteDeadline: 10 * time.Second}
	if s.address != "" {
		host, port, ok := strings.Cut(s.address, ":")
		n, err := strconv.Atoi(port)
		if !ok || err != nil {
			return nil, fmt.Errorf("--listen-address %q: want host:port", s.address)
		}
		o.Host, o.Port = host, n
		conf, err := s.id.Config()
		if err != nil {
			return nil, err
		}
		conf.ClientAuth = tls.RequireAndVerifyClientCert
		o.TLS, o.TLSVerify, o.TLSMap, o.TLSConfig, o.TLSTimeout = true, true, true, conf, 5
		// Registry alone writes the log; watchfanout reads it, and may ask the publisher how far it is.
		o.Users = []*natsserver.User{
			{Username: "CN=registry"},
			{Username: "CN=watchfanout", Permissions: &natsserver.Permissions{Publish: &natsserver.SubjectPermission{Deny: []string{"watershed.event.>", "watershed.progress", "$JS.API.STREAM.CREATE.>", "$JS.API.STREAM.UPDATE.>", "$JS.API.STREAM.DELETE.>", "$JS.API.STREAM.PURGE.>", "$JS.API.STREAM.MSG.DELETE.>"}}}},
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

// natsCommand runs NATS in a process of its own.
func natsCommand(args []string) error {
	fs := pflag.NewFlagSet("watershed nats", pflag.ContinueOnError)
	var s natsSettings
	fs.StringVar(&s.dir, "data-dir", "", "Where JetStream keeps its data.")
	fs.StringVar(&s.address, "listen-address", "127.0.0.1:4222", "host:port to serve clients on.")
	s.id.AddFlags(fs)
	if err := config.Load(fs, args); err != nil {
		return help(err)
	}
	ctx, cancel := lifecycle.Signalled()
	defer cancel()
	srv, err := startNATS(s)
	if err != nil {
		return err
	}
	<-ctx.Done()
	srv.Shutdown()
	srv.WaitForShutdown()
	return nil
}

// etcdPart and natsPart run the embedded servers as parts of a process.
func etcdPart(s etcdSettings) lifecycle.Part {
	started := make(chan struct{})
	return lifecycle.Part{Name: "etcd", Run: func(ctx context.Context) error {
		e, err := startEtcd(s)
		if err != nil {
			return err
		}
		defer e.Close()
		select {
		case <-e.Server.ReadyNotify():
			close(started)
		case <-ctx.Done():
			return nil
		}
		select {
		case err := <-e.Err():
			return err
		case <-ctx.Done():
			return nil
		}
	}, Ready: closed(started, "etcd is starting")}
}

func closed(c <-chan struct{}, otherwise string) func(context.Context) error {
	return func(context.Context) error {
		select {
		case <-c:
			return nil
		default:
			return errors.New(otherwise)
		}
	}
}
