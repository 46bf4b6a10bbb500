// Package egress dials systems outside of the control plane through the proxies of an EgressSelectorConfiguration, such
// as konnectivity (KEP-1281). The networks are those of kube-apiserver:
//
//   - cluster: nodes, pods, Services, aggregated API servers and webhooks that name a Service
//     (k8s.io/kubernetes/cmd/kube-apiserver/app/server.go, k8s.io/kube-aggregator/pkg/apiserver/apiserver.go);
//   - controlplane: webhooks that name a URL (k8s.io/apiserver/pkg/util/webhook/authentication.go), and the webhooks of
//     authentication, authorization and audit (k8s.io/kubernetes/pkg/controlplane/apiserver/config.go,
//     k8s.io/apiserver/pkg/server/options/audit.go), and the collector of spans (tracing.go beside it);
//   - etcd: etcd;
//   - an issuer of OpenID Connect: cluster or controlplane, if its egressSelectorType says so.
//
// Connections between services and to NATS use no egress network.
package egress

import (
	"context"
	"errors"
	"fmt"
	"net"

	"github.com/spf13/pflag"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	apiserver "k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/server/egressselector"
	"k8s.io/client-go/transport"
)

// Config is the --egress-selector-config-file of a service.
type Config struct {
	// File contains an EgressSelectorConfiguration (apiserver.k8s.io/v1beta1). Empty: all connections are direct.
	File string
}

// AddFlags registers --egress-selector-config-file.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.File, "egress-selector-config-file", "", "File with apiserver egress selector configuration.")
}

// Selector holds the dialer of each network. The zero value dials every network directly.
type Selector struct {
	upstream *egressselector.EgressSelector
	cluster  *transport.DialHolder
}

// Open reads the file (k8s.io/apiserver/pkg/server/options, EgressSelectorOptions.ApplyTo). The error names the flag
// and the file.
func (c *Config) Open() (Selector, error) {
	fail := func(err error) (Selector, error) {
		return Selector{}, fmt.Errorf("--egress-selector-config-file %q: %w", c.File, err)
	}
	selection, err := egressselector.ReadEgressSelectorConfiguration(c.File)
	if err != nil {
		return fail(err)
	}
	if errs := egressselector.ValidateEgressSelectorConfiguration(selection); len(errs) > 0 {
		return fail(errs.ToAggregate())
	}
	if err := checkTransports(selection); err != nil {
		return fail(err)
	}
	s := Selector{}
	if s.upstream, err = egressselector.NewEgressSelector(selection); err != nil {
		return fail(err)
	}
	if dial := s.dialer(egressselector.Cluster); dial != nil {
		s.cluster = &transport.DialHolder{Dial: dial}
	}
	return s, nil
}

// OpenControlPlane reads the file and returns its Selector's ControlPlane.
func (c *Config) OpenControlPlane() (utilnet.DialFunc, error) {
	s, err := c.Open()
	return s.ControlPlane(), err
}

// checkTransports rejects configurations that pass validation and make kube-apiserver panic.
func checkTransports(c *apiserver.EgressSelectorConfiguration) error {
	if c == nil {
		return nil
	}
	for _, s := range c.EgressSelections {
		if t := s.Connection.Transport; t != nil && t.TCP != nil && t.TCP.TLSConfig == nil {
			return fmt.Errorf("%s: a proxy at %q is not supported: want https, or a Unix socket", s.Name, t.TCP.URL)
		}
	}
	return nil
}

// Upstream returns the selector for upstream packages, or nil without a file.
func (s Selector) Upstream() *egressselector.EgressSelector { return s.upstream }

// Lookup returns the dialer lookup for upstream packages, or nil without a file.
func (s Selector) Lookup() egressselector.Lookup {
	if s.upstream == nil {
		return nil
	}
	return s.upstream.Lookup
}

// Cluster returns the dialer of the cluster network, or nil if the file does not name the network: dial directly then.
// Every call returns the same DialHolder, because client-go caches a transport for each.
func (s Selector) Cluster() *transport.DialHolder { return s.cluster }

// ControlPlane returns the dialer of the controlplane network; nil as for Cluster.
func (s Selector) ControlPlane() utilnet.DialFunc { return s.dialer(egressselector.ControlPlane) }

// Etcd returns the dialer of etcd; nil as for Cluster. The dialer returns when its context is done, even if the proxy
// accepts the connection and does not respond, because gRPC waits for its dialer.
func (s Selector) Etcd() utilnet.DialFunc {
	dial := s.dialer(egressselector.Etcd)
	if dial == nil {
		return nil
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		type dialled struct {
			conn net.Conn
			err  error
		}
		done := make(chan dialled)
		go func() {
			c, err := dial(ctx, network, address)
			select {
			case done <- dialled{c, err}:
			case <-ctx.Done():
				if err == nil {
					c.Close()
				}
			}
		}()
		select {
		case d := <-done:
			return d.conn, d.err
		case <-ctx.Done():
			return nil, errors.Join(ctx.Err(), fmt.Errorf("the egress proxy of etcd does not respond for %s", address))
		}
	}
}

func (s Selector) dialer(to egressselector.EgressType) utilnet.DialFunc {
	if s.upstream == nil {
		return nil
	}
	dial, _ := s.upstream.Lookup(to.AsNetworkContext()) // Lookup returns no error
	return dial
}
