package storage

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/etcdserverpb"
	etcdkubernetes "go.etcd.io/etcd/client/v3/kubernetes"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/server/egressselector"

	"watershed.dev/platform/usertimeout"
)

// members checks the members of etcd clusters, and dials them. A member is lost if it does not respond or has no
// leader, while another member of its cluster has a leader. members closes the connections to a lost member, and
// refuses further connections, so that every client balances its calls over the other members.
//
// Without members, a call waits for TCP's timeout if the member's host has stopped. It waits for 7 s if the member
// responds, and no other member reaches it.
type members struct {
	mu        sync.Mutex
	byAddress map[string]*member

	stop  context.CancelFunc
	ctx   context.Context
	tasks sync.WaitGroup
}

// member is a member of a cluster. The mutex of members protects its fields, except client.
type member struct {
	address string
	// client is the client of the checks. It also connects to a lost member.
	client *etcdkubernetes.Client
	// failures is the number of failed checks since the last good check. lost is the error of the last check of a lost
	// member, or nil.
	failures int
	lost     error
	conns    map[net.Conn]struct{}
}

const (
	// memberCheckPeriod is the interval of checks, and memberCheckTimeout bounds a check. A member that does not
	// respond is lost after 3.5 s.
	memberCheckPeriod  = 500 * time.Millisecond
	memberCheckTimeout = time.Second
	// lostAfter is the number of failed checks after which a member is lost. A slow member may still execute writes, so
	// unresponsiveAfter is the number if the last check timed out.
	lostAfter         = 2
	unresponsiveAfter = 3
	// promptCheck is the longest check that shows that this process and its network are not slow.
	promptCheck = 300 * time.Millisecond
)

func newMembers() *members {
	m := &members{byAddress: map[string]*member{}}
	m.ctx, m.stop = context.WithCancel(context.Background())
	return m
}

// connect returns a client of an etcd, and checks the etcd's members until close if it is a cluster. dial is nil for
// direct connections.
func (m *members) connect(servers []string, tlsConfig *tls.Config, dial utilnet.DialFunc) (*etcdkubernetes.Client,
	error) {
	if !isCluster(servers) {
		return newClient(servers, tlsConfig, dial)
	}
	cluster, err := m.open(servers, tlsConfig, dial)
	if err != nil {
		return nil, err
	}
	m.tasks.Go(func() { m.run(cluster) })
	return newClient(servers, tlsConfig, m.dialer(dial))
}

// open returns the members of a cluster. The caller closes them.
func (m *members) open(servers []string, tlsConfig *tls.Config, dial utilnet.DialFunc) (cluster []*member, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, server := range servers {
		client, err := newClient([]string{server}, tlsConfig, dial)
		if err != nil {
			return nil, errors.Join(err, closeAll(cluster))
		}
		member := &member{address: addressOf(server), client: client, conns: map[net.Conn]struct{}{}}
		m.byAddress[member.address] = member
		cluster = append(cluster, member)
	}
	return cluster, nil
}

// close ends the checks.
func (m *members) close() {
	m.stop()
	m.tasks.Wait()
}

// isCluster reports whether an etcd has several members that members can dial.
func isCluster(servers []string) bool {
	return len(servers) > 1 && !slices.ContainsFunc(servers, isDialledByGRPC)
}

// isDialledByGRPC reports whether gRPC itself must dial a server of etcd: a Unix socket, or a server behind
// HTTPS_PROXY. gRPC uses neither with another dialer.
func isDialledByGRPC(server string) bool {
	if isSocket(server) {
		return true
	}
	proxy, err := http.ProxyFromEnvironment(&http.Request{URL: &url.URL{Scheme: "https", Host: addressOf(server)}})
	return proxy != nil || err != nil
}

// isSocket reports whether a server of etcd is a Unix socket.
func isSocket(server string) bool {
	return strings.HasPrefix(server, "unix:") || strings.HasPrefix(server, "unixs:")
}

// addressOf returns the address that clientv3 dials for a server.
func addressOf(server string) string {
	if u, err := url.Parse(server); err == nil && u.Host != "" {
		return u.Host
	}
	return server
}

// run checks the members of a cluster until close.
func (m *members) run(cluster []*member) {
	defer func() { _ = closeAll(cluster) }()
	tick := time.NewTicker(memberCheckPeriod)
	defer tick.Stop()
	for {
		m.check(cluster)
		select {
		case <-tick.C:
		case <-m.ctx.Done():
			return
		}
	}
}

func closeAll(cluster []*member) (err error) {
	for _, member := range cluster {
		err = errors.Join(err, member.client.Close())
	}
	return err
}

// result is the result of a check.
type result struct {
	err  error
	took time.Duration
}

// check checks each member of a cluster.
func (m *members) check(cluster []*member) {
	results := make([]result, len(cluster))
	var checks sync.WaitGroup
	for i, member := range cluster {
		checks.Go(func() {
			start := time.Now()
			err := member.check(m.ctx)
			results[i] = result{err, time.Since(start)}
		})
	}
	checks.Wait()
	if m.ctx.Err() == nil {
		m.record(cluster, results)
	}
}

// record records a check of each member of a cluster. The checks have no effect if all fail: the cluster elects a
// leader, or this host is cut off. A timeout has no effect if no member responds promptly: this process may be slow.
func (m *members) record(cluster []*member, results []result) {
	if !slices.ContainsFunc(results, func(r result) bool { return r.err == nil }) {
		return
	}
	prompt := slices.ContainsFunc(results, func(r result) bool { return r.err == nil && r.took <= promptCheck })
	for i, member := range cluster {
		err := results[i].err
		if !prompt && errors.Is(err, errUnresponsive) {
			continue
		}
		for _, conn := range m.checked(member, err) {
			_ = conn.Close()
		}
	}
}

var (
	// errNoLeader is the error of a member that responds and has no leader.
	errNoLeader = errors.New("the member has no leader")
	// errUnresponsive is the error of a member that does not respond within memberCheckTimeout.
	errUnresponsive = errors.New("the member does not respond")
)

// check returns why the member cannot serve. A member that refuses the request serves others.
func (m *member) check(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, memberCheckTimeout)
	defer cancel()
	resp, err := etcdserverpb.NewMaintenanceClient(m.client.ActiveConnection()).Status(ctx,
		&etcdserverpb.StatusRequest{})
	switch code := status.Code(err); {
	case code == codes.OK && resp.Leader == 0:
		return errNoLeader
	case code == codes.DeadlineExceeded:
		return fmt.Errorf("%w: %s", errUnresponsive, status.Convert(err).Message())
	case code == codes.Unavailable:
		return errors.New(status.Convert(err).Message())
	}
	return nil
}

// checked records the result of a check. It returns the connections to close.
func (m *members) checked(member *member, err error) (closing []net.Conn) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err == nil {
		if member.lost != nil {
			slog.Info("The member of etcd serves again", "server", member.address)
		}
		member.failures, member.lost = 0, nil
		return nil
	}
	after := lostAfter
	if errors.Is(err, errUnresponsive) {
		after = unresponsiveAfter
	}
	if member.failures++; member.failures < after {
		return nil
	}
	if member.lost == nil {
		slog.Warn("A member of etcd is lost; the other members serve", "server", member.address, "error", err)
	}
	member.lost = err
	for conn := range member.conns {
		closing = append(closing, conn)
	}
	return closing
}

// lookup replaces the lookup of upstream's clients of etcd, which dial through dial. Nil: directly.
func (m *members) lookup(dial utilnet.DialFunc) egressselector.Lookup {
	return func(egressselector.NetworkContext) (utilnet.DialFunc, error) { return m.dialer(dial), nil }
}

// dialer returns a dialer that refuses lost members. gRPC sets TCP_USER_TIMEOUT only for a *net.TCPConn, so the dialer
// sets it.
func (m *members) dialer(dial utilnet.DialFunc) utilnet.DialFunc {
	if dial == nil {
		dial = (&net.Dialer{Control: usertimeout.Control(keepaliveTimeout)}).DialContext
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		if err := m.lost(address); err != nil {
			return nil, err
		}
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return m.add(address, conn), nil
	}
}

// lost returns an error if the member at the address is lost.
func (m *members) lost(address string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if member := m.byAddress[address]; member != nil && member.lost != nil {
		return fmt.Errorf("the etcd member at %s is lost: %w", address, member.lost)
	}
	return nil
}

// add returns a connection that is closed when its member is lost.
func (m *members) add(address string, conn net.Conn) net.Conn {
	m.mu.Lock()
	defer m.mu.Unlock()
	member := m.byAddress[address]
	if member == nil {
		return conn
	}
	c := &memberConn{Conn: conn, remove: func(c net.Conn) {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(member.conns, c)
	}}
	member.conns[c] = struct{}{}
	return c
}

// memberConn is a connection to a member.
type memberConn struct {
	net.Conn
	remove func(net.Conn)
}

// Close implements net.Conn.
func (c *memberConn) Close() error {
	c.remove(c)
	return c.Conn.Close()
}
