package storage

import (
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"time"
	_ "unsafe" // for go:linkname

	grpcprom "github.com/grpc-ecosystem/go-grpc-middleware/providers/prometheus"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/server/egressselector"
	"k8s.io/apiserver/pkg/storage/etcd3/metrics"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	certutil "k8s.io/client-go/util/cert"

	"watershed.dev/platform/egress"
	"watershed.dev/platform/rpc"
)

// keepaliveTimeout bounds the response to a keepalive, and how long etcd's host may not acknowledge data.
const keepaliveTimeout = 5 * time.Second

// newClient returns a client of etcd, which connects through dial. Nil: directly.
func newClient(servers []string, tlsConfig *tls.Config, dial utilnet.DialFunc,
	more ...grpc.DialOption) (*etcdkubernetes.Client, error) {
	client, err := etcdkubernetes.New(clientv3.Config{
		Endpoints:            servers,
		TLS:                  tlsConfig,
		Logger:               zap.NewNop(),
		DialTimeout:          20 * time.Second,
		DialKeepAliveTime:    10 * time.Second,
		DialKeepAliveTimeout: keepaliveTimeout,
		MaxCallRecvMsgSize:   maxRangeBytes,
		DialOptions: append(append(dialOptions(dial), more...), grpc.WithConnectParams(grpc.ConnectParams{
			MinConnectTimeout: 3 * time.Second,
			Backoff: backoff.Config{
				BaseDelay:  50 * time.Millisecond,
				Multiplier: 1.6,
				Jitter:     0.2,
				MaxDelay:   time.Second,
			},
		})),
	})
	if err != nil {
		return nil, err
	}
	client.Kubernetes = pagedLists{client.Kubernetes}
	return client, nil
}

// newUpstreamClient opens the etcd clients of upstream's allocators, leases and probes. Upstream's function waits for a
// connection, and returns an error after 20 s without a response of etcd. The start would end with that error, and no
// option replaces the function.
//
//go:linkname newUpstreamClient k8s.io/apiserver/pkg/storage/storagebackend/factory.newETCD3Client
var newUpstreamClient func(storagebackend.TransportConfig) (*etcdkubernetes.Client, error)

// clientMetrics are upstream's metrics of these clients, grpc_client_*.
//
//go:linkname clientMetrics k8s.io/apiserver/pkg/storage/storagebackend/factory.grpcpromClientMetrics
var clientMetrics *grpcprom.ClientMetrics

func init() {
	newUpstreamClient = func(c storagebackend.TransportConfig) (*etcdkubernetes.Client, error) {
		tlsConfig, err := (&Options{CertFile: c.CertFile, KeyFile: c.KeyFile, CAFile: c.TrustedCAFile}).tlsConfig()
		if err != nil {
			return nil, err
		}
		var dial utilnet.DialFunc
		if c.EgressLookup != nil {
			if dial, err = c.EgressLookup(egressselector.Etcd.AsNetworkContext()); err != nil {
				return nil, err
			}
		}
		return newClient(c.ServerList, tlsConfig, dial,
			grpc.WithChainUnaryInterceptor(clientMetrics.UnaryClientInterceptor()),
			grpc.WithChainStreamInterceptor(clientMetrics.StreamClientInterceptor()))
	}
}

// dialOptions returns the options of the connection to etcd.
func dialOptions(dial utilnet.DialFunc) []grpc.DialOption {
	options := rpc.TracingDialOptions()
	if dial == nil {
		return options
	}
	return append(options, grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		return dial(ctx, "tcp", address)
	}))
}

// tlsConfig reads the files of the connection to etcd. It returns nil if no file is set.
func (o *Options) tlsConfig() (*tls.Config, error) {
	if o.CertFile == "" && o.KeyFile == "" && o.CAFile == "" {
		return nil, nil
	}
	if o.CAFile != "" {
		if _, err := certutil.NewPool(o.CAFile); err != nil {
			return nil, fmt.Errorf("--etcd-cafile %q: %w", o.CAFile, err)
		}
	}
	info := transport.TLSInfo{CertFile: o.CertFile, KeyFile: o.KeyFile, TrustedCAFile: o.CAFile}
	config, err := info.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("--etcd-certfile %q, --etcd-keyfile %q: %w", o.CertFile, o.KeyFile, err)
	}
	return config, nil
}

// sizeMonitor reports the size of etcd's database for a metric, when the metric is read.
type sizeMonitor struct{ *clientv3.Client }

// Monitor implements metrics.Monitor.
func (m sizeMonitor) Monitor(ctx context.Context) (metrics.StorageMetrics, error) {
	endpoints := m.Endpoints()
	status, err := m.Status(ctx, endpoints[rand.IntN(len(endpoints))])
	if err != nil {
		return metrics.StorageMetrics{}, err
	}
	return metrics.StorageMetrics{Size: status.DbSize}, nil
}

// Close implements metrics.Monitor. It keeps the client, which the storage owns.
func (m sizeMonitor) Close() error { return nil }

// selectorOf returns out, or no selector if all servers are Unix sockets, which no proxy reaches.
func selectorOf(servers []string, out egress.Selector) egress.Selector {
	if slices.ContainsFunc(servers, func(s string) bool { return !isSocket(s) }) {
		return out
	}
	return egress.Selector{}
}
