package main

import (
	"fmt"
	"net"
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	serveroptions "k8s.io/apiserver/pkg/server/options"
	netutils "k8s.io/utils/net"
)

// servingPair is the name of the serving certificate and its key in --cert-dir.
const servingPair = "apiserver"

// certSettings returns the settings of the serving certificate in --cert-dir.
func (l *layout) certSettings() map[string]any {
	return map[string]any{
		"tls-cert-file":        filepath.Join(l.certDir, servingPair+".crt"),
		"tls-private-key-file": filepath.Join(l.certDir, servingPair+".key"),
	}
}

// createServingCert creates a self-signed certificate in --cert-dir if the directory has none. The names are
// kube-apiserver's (k8s.io/kubernetes/cmd/kube-apiserver/app/options, Complete).
func (l *layout) createServingCert(fs *pflag.FlagSet) error {
	if l.certDir == "" {
		return nil
	}
	bind, _ := fs.GetString("bind-address")
	o := serveroptions.NewSecureServingOptions()
	o.BindAddress, o.BindPort = net.ParseIP(bind), l.port
	o.ServerCert.CertDirectory, o.ServerCert.PairName = l.certDir, servingPair
	advertised, _ := fs.GetString("advertise-address")
	if net.ParseIP(advertised) == nil {
		ip, err := utilnet.ResolveBindAddress(o.BindAddress)
		if err != nil { // the host has no other address
			ip = net.IPv4(127, 0, 0, 1)
		}
		advertised = ip.String()
	}
	err := o.MaybeDefaultWithSelfSignedCerts(advertised,
		[]string{"kubernetes.default.svc", "kubernetes.default", "kubernetes"}, serviceIPs(fs))
	if err != nil {
		return fmt.Errorf("--cert-dir %q: %w", l.certDir, err)
	}
	return nil
}

// serviceIPs returns the address of the Service kubernetes, the first of --service-cluster-ip-range. It is empty if the
// range is invalid: registry rejects it.
func serviceIPs(fs *pflag.FlagSet) []net.IP {
	ranges, _ := fs.GetString("service-cluster-ip-range")
	primary, _, _ := strings.Cut(ranges, ",")
	_, cidr, err := net.ParseCIDR(primary)
	if err != nil {
		return nil
	}
	ip, err := netutils.GetIndexedIP(cidr, 1)
	if err != nil {
		return nil
	}
	return []net.IP{ip}
}
