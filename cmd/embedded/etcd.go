// Package embedded runs Watershed's storage: etcd, and NATS with JetStream. Each is a runner of a process (up) or a
// process of its own (split, Kubernetes). The package configures both. It does not read or write their data, with an
// exception: it removes damaged files that NATS cannot start with.
//
// Review notes:
//
//   - accounts.conf is the only authorization in NATS. Never allow a user to create a consumer, and never allow the
//     watch cache a JetStream API, because NATS does not bound the cost of a direct get.
//   - Do not use NATS' own monitoring port: it shows every reader the clients and goroutines of the server.
//   - chooseClusterState must run before a member without data starts. Otherwise a wrong --initial-cluster creates a
//     second, empty cluster.
//   - Only registry may connect to etcd, and only etcd to its peers, by the common name of the certificate.
package embedded

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/membership"
	"go.etcd.io/etcd/server/v3/storage/wal"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"watershed.dev/platform/lifecycle"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/telemetry"
	"watershed.dev/platform/zaplog"
)

// Etcd is an etcd member. Its flags have etcd's names.
type Etcd struct {
	// Dir is the data directory.
	Dir string
	// Listen is the URL for clients: a unix socket, or https with mutual TLS. Advertise is the URL that clients use.
	// Empty: Listen.
	Listen, Advertise string
	// Metrics is a URL that serves /metrics, /livez, /readyz and /health without TLS. Empty: none.
	Metrics string
	// ID is the member's identity on the inner network.
	ID rpc.TLS
	// Name, Peer, AdvertisePeer and InitialCluster make it a member of a cluster. With Peer empty it is the only
	// member.
	Name, Peer, AdvertisePeer, InitialCluster string
	// State is "new", or "existing" for a member that joins a running cluster.
	State string

	// program, if set, is the process's report, which registry reads on a connection of an etcd client.
	program *process.Program
}

// The limits of etcd, as installers of kube-apiserver set them.
const (
	// EtcdQuotaBytes bounds the size of etcd's database. At this size, etcd raises the alarm NOSPACE.
	EtcdQuotaBytes      = 8 << 30
	etcdMaxRequestBytes = 3 << 20
)

// AddFlags registers the member's flags with their defaults.
func (e *Etcd) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&e.Dir, "data-dir", "", "The data directory of etcd.")
	fs.StringVar(&e.Listen, "listen-client-urls", "https://127.0.0.1:2379", "The URL to listen on for clients.")
	fs.StringVar(&e.Advertise, "advertise-client-urls", "",
		"The URL at which clients reach this member. Empty: --listen-client-urls.")
	fs.StringVar(&e.Metrics, "listen-metrics-urls", "",
		"A URL that serves /metrics, /livez, /readyz and /health without TLS: loopback or an inner network only.")
	fs.StringVar(&e.Name, "name", "watershed", "The name of this member in --initial-cluster.")
	fs.StringVar(&e.Peer, "listen-peer-urls", "", "The https URL for other members. Empty: a cluster of one member.")
	fs.StringVar(&e.AdvertisePeer, "initial-advertise-peer-urls", "",
		"The URL at which other members reach this member. Empty: --listen-peer-urls.")
	fs.StringVar(&e.InitialCluster, "initial-cluster", "", "Every member's name and peer URL: a=https://host:2380,b=….")
	fs.StringVar(&e.State, "initial-cluster-state", embed.ClusterStateFlagNew,
		`"new", or "existing" for a member that joins a running cluster.`)
	e.ID.AddFlags(fs)
}

// EtcdCommand runs a member in its own process until a signal stops it.
func EtcdCommand(fs *pflag.FlagSet) func() error {
	var e Etcd
	e.AddFlags(fs)
	r := e.Runner()
	run := runStandalone(fs, r)
	return func() error {
		e.program = &process.Program{
			Name:     r.Name,
			Address:  cmp.Or(e.Advertise, e.Listen),
			ID:       &e.ID,
			Flags:    fs,
			NotReady: r.Ready.Err,
		}
		expirations := process.Expirations(&e.ID)
		prometheus.MustRegister(expirations) // etcd serves the default registry
		defer prometheus.Unregister(expirations)
		return run()
	}
}

// Runner returns a runner of the member, which is ready when the member serves clients.
func (e *Etcd) Runner() lifecycle.Runner {
	ready := lifecycle.NotReady("etcd")
	return lifecycle.Runner{Name: "etcd", Ready: ready, Run: func(ctx context.Context) error {
		if e.Dir == "" {
			return errors.New("--data-dir is required")
		}
		store, err := openStore(e.Dir)
		if err != nil {
			return err
		}
		defer store.Close()
		var level slog.LevelVar
		level.Set(slog.LevelError)
		conf, err := e.config(&level)
		if err != nil {
			return err
		}
		if err := e.checkFree(); err != nil {
			return err
		}
		if err := e.chooseClusterState(ctx, conf); err != nil {
			return err
		}
		member, err := embed.StartEtcd(conf)
		if err != nil {
			return err
		}
		defer func() {
			level.Set(slog.LevelDebug) // its listeners report that they are closed
			member.Close()
		}()
		for isReady := member.Server.ReadyNotify(); ; {
			select {
			case <-isReady:
				ready.Set("etcd", nil)
				isReady = nil
			case <-member.Server.StopNotify():
				return errRemoved
			case err := <-member.Err():
				return err
			case <-ctx.Done():
				return nil
			}
		}
	}}
}

// errRemoved is the error of a member that its cluster has removed. etcd's server has stopped, but its listeners still
// accept connections.
var errRemoved = errors.New("the member has stopped, because its cluster has removed it: " +
	"move --data-dir away, add the member (etcdctl member add), and start it again")

// config returns the member's configuration. level is the level of its errors in the log.
func (e *Etcd) config(level slog.Leveler) (*embed.Config, error) {
	c := embed.NewConfig()
	c.Name, c.Dir = cmp.Or(e.Name, "watershed"), e.Dir
	c.QuotaBackendBytes, c.MaxRequestBytes = EtcdQuotaBytes, etcdMaxRequestBytes
	c.EnableGRPCGateway = false
	c.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zaplog.New(level))
	if e.Metrics != "" {
		m, err := parse("listen-metrics-urls", e.Metrics)
		if err != nil {
			return nil, err
		}
		c.ListenMetricsUrls = m
	}
	if e.program != nil {
		c.ServiceRegister = func(s *grpc.Server) { process.RegisterProcesses(s, e.program.Report) }
	}
	if err := e.clients(c); err != nil {
		return nil, err
	}
	return c, e.peers(c)
}

// openStore creates the directory of a store, and locks it until the file is closed. bbolt would wait for a lock of
// another etcd without a line, and NATS has no lock.
func openStore(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	return process.LockStore(dir)
}

// checkFree returns an error if another process has a port of the member. etcd's error has no flag, and an etcd with
// data reports the port of the metrics late.
func (e *Etcd) checkFree() error {
	free := func(flag, value string) error {
		u, err := url.Parse(value)
		if err != nil || u.Scheme == "unix" {
			return nil
		}
		return checkFree(flag, value, u.Host)
	}
	return cmp.Or(free("listen-client-urls", e.Listen), free("listen-peer-urls", e.Peer),
		free("listen-metrics-urls", e.Metrics))
}

// checkFree returns an error if another process has the address of a flag's value. The address may be empty.
func checkFree(flag, value, address string) error {
	if address == "" {
		return nil
	}
	if err := process.CheckFree(address); err != nil {
		return fmt.Errorf("--%s %q: %w", flag, value, err)
	}
	return nil
}

// clients configures the URLs for clients. Only registry's certificate is accepted.
func (e *Etcd) clients(c *embed.Config) (err error) {
	if c.ListenClientUrls, err = parse("listen-client-urls", e.Listen); err != nil {
		return err
	}
	if c.ListenClientUrls[0].Scheme == "unix" { // etcd cannot advertise a socket, and no client reads the URL
		c.AdvertiseClientUrls = unusedURLs
		return nil
	}
	if c.AdvertiseClientUrls, err = parse("advertise-client-urls", cmp.Or(e.Advertise, e.Listen)); err != nil {
		return err
	}
	if c.ListenClientUrls[0].Scheme != "https" {
		return fmt.Errorf(
			"--listen-client-urls %q: want an https URL, or a unix socket: clients of etcd use certificates",
			e.Listen,
		)
	}
	if e.ID.CertFile == "" || e.ID.KeyFile == "" || e.ID.CAFile == "" {
		return errors.New("--rpc-cert-file, --rpc-key-file and --rpc-ca-file are required: clients of etcd use certificates")
	}
	c.ClientTLSInfo = e.mutualTLS("registry")
	return nil
}

// unusedURLs is a placeholder for URLs that no client reads, because a member must advertise a URL.
var unusedURLs = []url.URL{{Scheme: "http", Host: "localhost:1"}}

// peers configures the member as part of a cluster, or as the only member.
func (e *Etcd) peers(c *embed.Config) (err error) {
	c.ClusterState = cmp.Or(e.State, embed.ClusterStateFlagNew)
	if e.Peer == "" {
		sockets, err := process.SocketDir(e.Dir)
		if err != nil {
			return err
		}
		c.ListenPeerUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(sockets, "peer.sock")}}
		c.AdvertisePeerUrls = unusedURLs
		// etcd keeps its newest entries in memory for followers that are behind. This member has none.
		c.SnapshotCount, c.SnapshotCatchUpEntries = 1000, 1
		c.InitialCluster = c.Name + "=" + unusedURLs[0].String()
		return nil
	}
	if c.ListenPeerUrls, err = parse("listen-peer-urls", e.Peer); err != nil {
		return err
	}
	c.AdvertisePeerUrls, err = parse("initial-advertise-peer-urls", cmp.Or(e.AdvertisePeer, e.Peer))
	c.InitialCluster = e.InitialCluster
	c.PeerTLSInfo = e.mutualTLS("etcd")
	// etcd would look up the peer's name in DNS, and a member could not return while DNS does not respond.
	c.PeerTLSInfo.SkipClientSANVerify = true
	return err
}

// mutualTLS accepts only certificates with the common name client.
func (e *Etcd) mutualTLS(client string) transport.TLSInfo {
	return transport.TLSInfo{
		CertFile:       e.ID.CertFile,
		KeyFile:        e.ID.KeyFile,
		TrustedCAFile:  e.ID.CAFile,
		ClientCertAuth: true,
		AllowedCNs:     []string{client},
	}
}

func parse(flag, value string) ([]url.URL, error) {
	u, err := url.Parse(value)
	if err != nil {
		return nil, fmt.Errorf("--%s %q: %w", flag, value, err)
	}
	return []url.URL{*u}, nil
}

// runStandalone adds the flags of logs to fs, and returns a function that runs a runner in its own process.
func runStandalone(fs *pflag.FlagSet, r lifecycle.Runner) (run func() error) {
	var o telemetry.Options
	o.AddLogFlags(fs)
	return func() error {
		if err := o.StartLogs(r.Name, os.Stderr); err != nil {
			return err
		}
		ctx, cancel := lifecycle.SignalContext()
		defer cancel()
		go process.ReleaseAtRest(ctx, r.Ready)
		return lifecycle.Run(ctx, []lifecycle.Runner{r}, lifecycle.Observer{})
	}
}

// chooseClusterState compares a member without data with the running members' cluster. It rejects a start with another
// --initial-cluster: etcd would start a second, empty cluster beside the running members. A member that was added to
// the running cluster joins it, so that a replacement needs no other flags. It waits while another member may run and
// none responds: a member that has lost its data must not vote again.
func (e *Etcd) chooseClusterState(ctx context.Context, c *embed.Config) error {
	if c.ClusterState != embed.ClusterStateFlagNew || e.Peer == "" || hasData(e.Dir) {
		return nil
	}
	members, err := types.NewURLsMap(c.InitialCluster)
	if err != nil {
		return fmt.Errorf("--initial-cluster %q: %w", c.InitialCluster, err)
	}
	cluster, err := membership.NewClusterFromURLsMap(zap.NewNop(), c.InitialClusterToken, members)
	if err != nil {
		return fmt.Errorf("--initial-cluster %q: %w", c.InitialCluster, err)
	}
	rt, err := transport.NewTransport(c.PeerTLSInfo, peerTimeout)
	if err != nil {
		return err
	}
	client := &http.Client{Transport: rt, Timeout: peerTimeout}
	for warned := (time.Time{}); ; {
		unknown, err := e.compareMembers(ctx, client, c, members, cluster.ID().String())
		if unknown == nil {
			return err
		}
		if time.Since(warned) >= waitWarningPeriod {
			warned = time.Now()
			slog.Warn("This member has no data, and waits until another member responds or its host refuses the "+
				"connection: start the host, or correct --initial-cluster", "error", unknown)
		}
		if err := lifecycle.Sleep(ctx, peerRetryPeriod); err != nil {
			return err
		}
	}
}

// compareMembers chooses the state by the responses of the other members. unknown is an error of a member that may run,
// if no member responds.
func (e *Etcd) compareMembers(ctx context.Context, client *http.Client, c *embed.Config, members types.URLsMap,
	cluster string) (unknown, err error) {
	responded := false
	var lost error
	for name, urls := range members {
		if name == c.Name {
			continue
		}
		id, listed, err := readMembers(ctx, client, urls[0].String())
		if err != nil && id == "" {
			if !isDown(err) {
				unknown = err
			}
			continue
		}
		responded = responded || id != ""
		if id != "" && id != cluster {
			const text = "--initial-cluster %q: %s is a member of another cluster, %s: add this member there " +
				"(etcdctl member add) and start it with --initial-cluster-state=existing"
			return nil, fmt.Errorf(text, c.InitialCluster, name, id)
		}
		for _, m := range listed {
			switch {
			case !slices.Contains(m.PeerURLs, c.AdvertisePeerUrls[0].String()):
			case m.Name == "": // etcdctl member add gives no name
				c.ClusterState = embed.ClusterStateFlagExisting
			case len(m.ClientURLs) > 0: // it has run
				lost = fmt.Errorf("--data-dir %q has no data, and %s lists this member: replace it with etcdctl member "+
					"remove %s, and etcdctl member add %s --peer-urls=%s", e.Dir, name, m.ID, c.Name, m.PeerURLs[0])
			}
		}
	}
	switch {
	case !responded && unknown != nil:
		return unknown, nil
	case c.ClusterState == embed.ClusterStateFlagExisting: // a member that lags may still list the former member
		return nil, nil
	}
	return nil, lost
}

// isDown reports whether an error means that a member does not run: its port is closed, or its name does not exist yet.
func isDown(err error) bool {
	var dns *net.DNSError
	return errors.Is(err, syscall.ECONNREFUSED) || errors.As(err, &dns) && dns.IsNotFound
}

// readMembers returns the ID of a running member's cluster, and its members.
func readMembers(ctx context.Context, client *http.Client, peer string) (id string, members []*membership.Member,
	err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, peer+"/members", nil)
	if err != nil {
		return "", nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return "", nil, err
	}
	defer resp.Body.Close()
	err = json.NewDecoder(io.LimitReader(resp.Body, maxMembersBytes)).Decode(&members)
	return resp.Header.Get("X-Etcd-Cluster-ID"), members, err
}

// maxMembersBytes bounds the response with a cluster's members, in bytes.
const maxMembersBytes = 1 << 20

// peerTimeout bounds the request for another member's cluster ID and members, and peerRetryPeriod is the pause between
// two attempts. waitWarningPeriod is the pause between two warnings of a wait.
const (
	peerTimeout       = 3 * time.Second
	peerRetryPeriod   = time.Second
	waitWarningPeriod = 10 * time.Second
)

// hasData reports whether a member has started with a data directory. The WAL is the last part that etcd creates, and
// etcd decides by it, too. A directory without it remains of an interrupted start.
func hasData(dir string) bool { return wal.Exist(filepath.Join(dir, "member", "wal")) }
