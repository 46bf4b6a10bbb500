// Package certgen makes and keeps the certificates and keys of a Watershed: those of the cluster that it serves, with
// kubeadm's names for their files, and those by which its services know each other.
//
// A CA or key that exists is never replaced; a leaf is made anew well before it ends, and whoever uses it reads it
// again.
package certgen

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"

	"sigs.k8s.io/yaml"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
)

// PKI is a directory of certificates and keys.
type PKI struct {
	// Dir is the directory.
	Dir string
	// Gateway is the URL at which clients of the cluster reach the gateway: that of admin.kubeconfig.
	Gateway string
	// ServicesGateway is the one at which authn, authz and admission do; empty: the same.
	ServicesGateway string
	// MountPath is where the directory's files are for whoever reads a service's kubeconfig; empty: Dir.
	MountPath string
	// Admin is where admin.kubeconfig goes; empty: into Dir.
	Admin string
	// Hosts are further names and addresses for the gateway's certificate, and StoreHosts for etcd's, whose clients
	// look for it by where it is.
	Hosts, StoreHosts []string

	// CA signs what the cluster's clients show, inner the services' identities among themselves: a client of the
	// cluster can have none of these.
	CA, inner, frontProxy *pki.CA
	issued                []Component
}

// Open makes what is missing in the directory.
func (p *PKI) Open() (err error) {
	if p.CA, err = pki.OpenCA(p.Dir, "ca", "kubernetes"); err != nil {
		return err
	}
	if p.inner, err = pki.OpenCA(p.Dir, "inner-ca", "watershed-inner"); err != nil {
		return err
	}
	if p.frontProxy, err = pki.OpenCA(p.Dir, "front-proxy-ca", "front-proxy-ca"); err != nil {
		return err
	}
	if _, _, err := pki.ServiceAccountKeys(p.Dir); err != nil {
		return err
	}
	if err := pki.SecretKey(p.JetStreamKey()); err != nil {
		return err
	}
	return p.issueLeaves()
}

// File is the path of a file of the directory.
func (p *PKI) File(name string) string { return filepath.Join(p.Dir, name) }

// JetStreamKey is the file of the key that the event log is encrypted with on disk.
func (p *PKI) JetStreamKey() string { return p.File("jetstream.key") }

// AdminKubeconfig is what whoever runs the cluster reaches it with.
func (p *PKI) AdminKubeconfig() string { return cmp.Or(p.Admin, p.File("admin.kubeconfig")) }

// Kubeconfig is what authn, authz or admission reads the cluster with.
func (p *PKI) Kubeconfig(service string) string { return p.File(service + ".kubeconfig") }

// Identity is a service's on the inner network.
func (p *PKI) Identity(service string) rpc.TLS {
	leaf := p.File("inner-" + service)
	return rpc.TLS{CertFile: leaf + ".crt", KeyFile: leaf + ".key", CAFile: p.inner.CertFile()}
}

// innerUsage is what each identity of the inner network is shown for: who calls, who is called.
var innerUsage = map[string]pki.Usage{
	"gateway":     pki.Server | pki.Client, // authn, authz and admission call it as clients of the cluster
	"authn":       pki.Server,
	"authz":       pki.Server,
	"admission":   pki.Server,
	"registry":    pki.Server | pki.Client,
	"watchfanout": pki.Server | pki.Client,
	"etcd":        pki.Server | pki.Client, // its members call each other
	"nats":        pki.Server | pki.Client,
	"xds":         pki.Server,
}

// issueLeaves makes the certificates that are missing, or old enough to be made anew.
func (p *PKI) issueLeaves() error {
	names := append([]string{"kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", "10.96.0.1"}, p.Hosts...)
	for _, leaf := range []struct {
		ca *pki.CA
		pki.Leaf
	}{
		{p.CA, pki.Leaf{
			Name:       "apiserver",
			CommonName: "kube-apiserver",
			SANs:       names,
			Usage:      pki.Server,
		}},
		{p.CA, pki.Leaf{
			Name:          "apiserver-kubelet-client",
			CommonName:    "kube-apiserver-kubelet-client",
			Organizations: []string{"system:masters"},
			Usage:         pki.Client,
		}},
		{p.CA, pki.Leaf{
			Name:          "admin",
			CommonName:    "kubernetes-admin",
			Organizations: []string{"system:masters"},
			Usage:         pki.Client,
		}},
		{p.frontProxy, pki.Leaf{Name: "front-proxy-client", CommonName: "front-proxy-client", Usage: pki.Client}},
	} {
		if _, _, _, err := leaf.ca.Leaf(leaf.Leaf); err != nil {
			return err
		}
	}
	admin := kubeconfig{path: p.AdminKubeconfig(), leaf: "admin", user: "kubernetes-admin"}
	errs := []error{p.write(admin), p.innerLeaves(), p.clientLeaves()}
	for _, c := range slices.Clone(p.issued) {
		_, err := p.Issue(c)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// innerLeaves issues the services' certificates on the inner network.
func (p *PKI) innerLeaves() error {
	for name, usage := range innerUsage {
		sans := []string{name}
		if name == "etcd" { // its clients look for it by address
			sans = append(append(sans, "localhost", "127.0.0.1"), p.StoreHosts...)
		}
		if _, _, _, err := p.inner.Leaf(pki.Leaf{
			Name:       "inner-" + name,
			CommonName: name,
			SANs:       sans,
			Usage:      usage,
		}); err != nil {
			return err
		}
	}
	return nil
}

// clientLeaves issues what authn, authz and admission read the cluster with. The inner CA signs it, and they are shown
// a certificate of the inner CA: so they are known whatever PKI the cluster has.
func (p *PKI) clientLeaves() error {
	for name, user := range map[string]string{
		"authn":     identity.Authn,
		"authz":     identity.Authz,
		"admission": identity.Admission,
	} {
		leaf := pki.Leaf{
			Name:          "client-" + name,
			CommonName:    user,
			Organizations: []string{identity.ServicesGroup},
			Usage:         pki.Client,
		}
		if _, _, _, err := p.inner.Leaf(leaf); err != nil {
			return err
		}
		own := kubeconfig{path: p.Kubeconfig(name), leaf: leaf.Name, user: user, service: true}
		if err := p.write(own); err != nil {
			return err
		}
	}
	return nil
}

// Component is a program of the cluster's own, as a user of the cluster.
type Component struct {
	// Name is that of its kubeconfig, without .kubeconfig, and of its certificate.
	Name, User string
	Groups     []string
}

// Issue makes a component's certificate and its kubeconfig, which holds all that it takes, and answers the kubeconfig's
// path. Renew, which must come after it, keeps both young.
func (p *PKI) Issue(c Component) (string, error) {
	if _, _, _, err := p.CA.Leaf(pki.Leaf{
		Name:          c.Name,
		CommonName:    c.User,
		Organizations: c.Groups,
		Usage:         pki.Client,
	}); err != nil {
		return "", err
	}
	path := p.File(c.Name + ".kubeconfig")
	if err := p.write(kubeconfig{path: path, leaf: c.Name, user: c.User}); err != nil {
		return "", err
	}
	p.issued = append(slices.DeleteFunc(p.issued, func(o Component) bool { return o.Name == c.Name }), c)
	return path, nil
}

// renewPeriod is how often it is looked whether a certificate is to be made anew.
const renewPeriod = time.Hour

// Renew keeps the certificates young until ctx is done.
func (p *PKI) Renew(ctx context.Context) {
	tick := time.NewTicker(renewPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := p.issueLeaves(); err != nil {
			slog.Error("Certificates were not renewed", "error", err)
		}
	}
}

// kubeconfig is how one user reaches the gateway.
type kubeconfig struct {
	path, leaf, user string
	// service: it is one of authn, authz and admission, whose kubeconfig names the files, which are read again when
	// they have been renewed. Any other holds all that it takes.
	service bool
}

func (p *PKI) write(k kubeconfig) (err error) {
	cluster, user := map[string]any{"server": p.Gateway}, map[string]any{}
	set := func(in map[string]any, key, file string) {
		if k.service {
			in[key] = p.mountedPath(file)
			return
		}
		b, rerr := os.ReadFile(p.File(file))
		if rerr != nil {
			err = rerr
		}
		in[key+"-data"] = base64.StdEncoding.EncodeToString(b)
	}
	ca := "ca.crt"
	if k.service {
		ca, cluster["tls-server-name"] = "inner-ca.crt", identity.Gateway
		if p.ServicesGateway != "" {
			cluster["server"] = p.ServicesGateway
		}
	}
	set(cluster, "certificate-authority", ca)
	set(user, "client-certificate", k.leaf+".crt")
	set(user, "client-key", k.leaf+".key")
	if err != nil {
		return err
	}
	doc, err := yaml.Marshal(map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": "watershed",
		"clusters":        []any{map[string]any{"name": "watershed", "cluster": cluster}},
		"users":           []any{map[string]any{"name": k.user, "user": user}},
		"contexts": []any{map[string]any{
			"name":    "watershed",
			"context": map[string]any{"cluster": "watershed", "user": k.user},
		}},
		"preferences": map[string]any{},
	})
	if err != nil {
		return err
	}
	return pki.WriteFile(k.path, doc, 0o600)
}

// mountedPath is where a file is for whoever reads a service's kubeconfig.
func (p *PKI) mountedPath(file string) string {
	if p.MountPath != "" {
		return filepath.Join(p.MountPath, file)
	}
	return p.File(file)
}

// URL is a gateway's at a host and port.
func URL(host string, port int) string {
	return "https://" + net.JoinHostPort(host, strconv.Itoa(port))
}
