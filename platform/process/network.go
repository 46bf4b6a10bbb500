package process

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/rpc"
)

// network holds the process's connections to the services of other processes.
type network struct {
	id      rpc.TLS
	address string
	peers   map[string]*[]string
	// xds finds replicas instead of peers if there are xDS servers.
	xdsServers  []string
	xdsCacheDir string
	xds         *rpc.XDS
	drain       time.Duration
	conns       []*grpc.ClientConn
}

// validate checks the addresses of other services, and that several services have identities of their own. callers are
// the services that call each service of another process.
func (n *network) validate(services int, callers map[string][]string) error {
	var errs []error
	for _, peer := range slices.Sorted(maps.Keys(n.peers)) {
		errs = append(errs, rpc.CheckAddresses(peer+"-addresses", *n.peers[peer]))
		if len(*n.peers[peer]) == 0 && len(n.xdsServers) == 0 {
			errs = append(errs, fmt.Errorf("--%s-addresses or --xds-servers is required: %s calls %s, which is not "+
				"among the targets", peer, strings.Join(callers[peer], " and "), peer))
		}
	}
	errs = append(errs, rpc.CheckAddresses("xds-servers", n.xdsServers))
	if cert := n.id.CertFile; services > 1 && cert != "" && !strings.Contains(cert, rpc.ServicePlaceholder) {
		errs = append(errs, fmt.Errorf("--rpc-cert-file %q: want %s in the path, because the process has several "+
			"services", cert, rpc.ServicePlaceholder))
	}
	return errors.Join(errs...)
}

// startXDS starts the client of the xDS servers, if there are any. The client has the identity of a service.
func (n *network) startXDS(ctx context.Context, service string) (err error) {
	if len(n.xdsServers) == 0 {
		return nil
	}
	host, _ := os.Hostname()
	c := rpc.XDSConfig{Servers: n.xdsServers, Dir: n.xdsCacheDir, Node: host, Fallback: map[string][]string{}}
	for peer, addresses := range n.peers {
		c.Fallback[peer] = *addresses
	}
	if n.xds, err = rpc.NewXDS(n.id.Of(service), c); err == nil {
		go n.xds.Run(context.WithoutCancel(ctx)) // until the process ends: a draining service makes calls
	}
	return err
}

// metrics returns the metrics of the process and of its xDS client, if it has a client.
func (n *network) metrics() *Metrics {
	m := NewMetrics()
	if n.xds != nil {
		m.Add(n.xds.Metrics())
	}
	return m
}

// replicas returns the replicas of a service of other processes.
func (n *network) replicas(service string) rpc.Replicas {
	if n.xds == nil {
		return rpc.Addresses(*n.peers[service])
	}
	return n.xds
}

// dial returns a service's connection to the replicas of another service.
func (n *network) dial(from, to string) (grpc.ClientConnInterface, error) {
	c, err := rpc.Dial(n.id.Of(from), to, n.replicas(to))
	if err != nil {
		return nil, err
	}
	c.Connect() // otherwise the first call would, and until then the addresses of the replicas are unknown
	n.conns = append(n.conns, c)
	return c, nil
}

func (n *network) close() {
	for _, c := range n.conns {
		c.Close()
	}
}
