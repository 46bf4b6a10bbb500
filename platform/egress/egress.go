// Package egress dials what is outside of the control plane by the way that an EgressSelectorConfiguration names, such
// as konnectivity's proxies (KEP-1281). Which network is whose is as in kube-apiserver:
//
//   - cluster: nodes, pods, Services, aggregated API servers and webhooks that name a Service
//     (k8s.io/kubernetes/cmd/kube-apiserver/app/server.go, k8s.io/kube-aggregator/pkg/apiserver/apiserver.go);
//   - controlplane: webhooks that name a URL (k8s.io/apiserver/pkg/util/webhook/authentication.go), and those of
//     authentication, authorization and audit (k8s.io/kubernetes/pkg/controlplane/apiserver/config.go,
//     k8s.io/apiserver/pkg/server/options/audit.go);
//   - etcd: etcd;
//   - an issuer of OpenID Connect: cluster or controlplane, if its egressSelectorType says so.
//
// The services' own connections to each other, to NATS and to where spans go are no network's.
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

// Config is a service's own --egress-selector-config-file.
type Config struct {
	// File is an EgressSelectorConfiguration (apiserver.k8s.io/v1beta1); empty: everything is dialled directly.
	File string
}

// AddFlags registers --egress-selector-config-file.
func (c *Config) AddFlags(fs *pflag.FlagSet) {
	fs.StringVar(&c.File, "egress-selector-config-file", "", "File with apiserver egress selector configuration.")
}

// Selector says how to dial into each network. Its zero value dials everything directly.
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

// checkTransports refuses what validation lets through and kube-apiserver panics at.
func checkTransports(c *apiserver.EgressSelectorConfiguration) error {
	if c == nil {
		return nil
	}
	for _, s := range c.EgressSelections {
		if t := s.Connection.Transport; t != nil && t.TCP != nil && t.TCP.TLSConfig == nil {
			return fmt.Errorf("%s: a proxy at %q is not offered: it is to be https, or a socket", s.Name, t.TCP.URL)
		}
	}
	return nil
}

// Upstream is the selector that upstream's packages take; nil where no file is given.
func (s Selector) Upstream() *egressselector.EgressSelector { return s.upstream }

// Lookup is how upstream's packages ask for a dialer; nil where no file is given.
func (s Selector) Lookup() egressselector.Lookup {
	if s.upstream == nil {
		return nil
	}
	return s.upstream.Lookup
}

// Cluster dials into the cluster; nil where the file does not name the network: then it is dialled directly. It is one
// and the same: client-go keeps a transport for each.
func (s Selector) Cluster() *transport.DialHolder { return s.cluster }

// ControlPlane dials into the network named so; nil as with Cluster.
func (s Selector) ControlPlane() utilnet.DialFunc { return s.dialer(egressselector.ControlPlane) }

// Etcd dials etcd; nil as with Cluster. It gives up when its context is done, also where the proxy takes the connection
// and does not answer: gRPC waits for its dialer.
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
			return nil, errors.Join(ctx.Err(), fmt.Errorf("etcd's proxy does not answer for %s", address))
		}
	}
}

func (s Selector) dialer(to egressselector.EgressType) utilnet.DialFunc {
	if s.upstream == nil {
		return nil
	}
	dial, _ := s.upstream.Lookup(to.AsNetworkContext()) // it has no error to give
	return dial
}
