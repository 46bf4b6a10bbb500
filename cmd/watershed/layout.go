package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
	"watershed.dev/services/gateway/edge"
)

// layout is a data directory: everything that a cluster on this machine is.
type layout struct {
	dir string
	// sockets is where sockets lie.
	sockets string
	lock    *os.File
	ca      *pki.CA
	// inner signs the services' identities among themselves; a client of the cluster can have none of these.
	inner      *pki.CA
	frontProxy *pki.CA
	// address and port are where the gateway is reached.
	address string
	port    int
	hosts   []string
}

// openLayout takes the directory for this process and makes what is missing. bind and port are what the gateway listens
// on.
func openLayout(dir, bind string, port int, hosts []string) (*layout, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	if err := process.OwnDirectory(dir); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	sockets, err := process.SocketDir(dir)
	if err != nil {
		return nil, err
	}
	l := &layout{dir: dir, sockets: sockets, address: "127.0.0.1", port: port, hosts: hosts}
	if ip := net.ParseIP(bind); ip != nil && !ip.IsUnspecified() {
		l.address, l.hosts = bind, append(hosts, bind)
	}
	if l.lock, err = os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	if err := unix.Flock(int(l.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		pid, _ := os.ReadFile(l.lock.Name())
		return nil, fmt.Errorf("--data-dir %q is in use by process %s; stop it or choose another directory", dir,
			strings.TrimSpace(string(pid)))
	}
	_ = l.lock.Truncate(0)
	_, _ = l.lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return l, l.certificates()
}

// close gives the directory up. The lock lasts as long as its file is open, and the layout keeps that from being
// collected.
func (l *layout) close() { _ = l.lock.Close() }

func (l *layout) pki() string { return filepath.Join(l.dir, "pki") }

func (l *layout) certificates() (err error) {
	if l.ca, err = pki.OpenCA(l.pki(), "ca", "kubernetes"); err != nil {
		return err
	}
	if l.inner, err = pki.OpenCA(l.pki(), "inner-ca", "watershed-inner"); err != nil {
		return err
	}
	if l.frontProxy, err = pki.OpenCA(l.pki(), "front-proxy-ca", "front-proxy-ca"); err != nil {
		return err
	}
	if _, _, err := pki.ServiceAccountKeys(l.pki()); err != nil {
		return err
	}
	if err := pki.SecretKey(l.jetStreamKey()); err != nil {
		return err
	}
	return l.leaves()
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

// leaves makes the certificates that are missing, or old enough to be made anew. Whoever uses one reads it again when
// it has changed.
func (l *layout) leaves() error {
	names := append([]string{"kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", "10.96.0.1"}, l.hosts...)
	for _, of := range []struct {
		ca *pki.CA
		pki.Leaf
	}{
		{l.ca, pki.Leaf{
			Name:       "apiserver",
			CommonName: "kube-apiserver",
			SANs:       names,
			Usage:      pki.Server,
		}},
		{l.ca, pki.Leaf{
			Name:          "apiserver-kubelet-client",
			CommonName:    "kube-apiserver-kubelet-client",
			Organizations: []string{"system:masters"},
			Usage:         pki.Client,
		}},
		{l.ca, pki.Leaf{
			Name:          "admin",
			CommonName:    "kubernetes-admin",
			Organizations: []string{"system:masters"},
			Usage:         pki.Client,
		}},
		{l.frontProxy, pki.Leaf{Name: "front-proxy-client", CommonName: "front-proxy-client", Usage: pki.Client}},
	} {
		if _, _, _, err := of.ca.Leaf(of.Leaf); err != nil {
			return err
		}
	}
	admin := kubeconfig{path: filepath.Join(l.dir, "admin.kubeconfig"), leaf: "admin", user: "kubernetes-admin"}
	if err := l.write(admin); err != nil {
		return err
	}
	return errors.Join(l.innerLeaves(), l.clientLeaves())
}

// innerLeaves issues the services' certificates on the inner network.
func (l *layout) innerLeaves() error {
	for name, usage := range innerUsage {
		sans := []string{name}
		if name == "etcd" { // its clients look for it by address
			sans = append(sans, "localhost", "127.0.0.1")
		}
		if _, _, _, err := l.inner.Leaf(pki.Leaf{
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
func (l *layout) clientLeaves() error {
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
		if _, _, _, err := l.inner.Leaf(leaf); err != nil {
			return err
		}
		own := kubeconfig{path: l.kubeconfigOf(name), leaf: leaf.Name, user: user, service: true}
		if err := l.write(own); err != nil {
			return err
		}
	}
	return nil
}

// renewPeriod is how often it is looked whether a certificate is to be made anew.
const renewPeriod = time.Hour

// renew keeps the certificates young until ctx is done.
func (l *layout) renew(ctx context.Context) {
	tick := time.NewTicker(renewPeriod)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := l.leaves(); err != nil {
			slog.Error("Certificates were not renewed", "error", err)
		}
	}
}

// jetStreamKey is the file of the key that the event log is encrypted with on disk.
func (l *layout) jetStreamKey() string { return filepath.Join(l.pki(), "jetstream.key") }

func (l *layout) kubeconfigOf(name string) string { return filepath.Join(l.pki(), name+".kubeconfig") }

// identity is a service's on the inner network.
func (l *layout) identity(name string) rpc.TLS {
	p := filepath.Join(l.pki(), "inner-"+name)
	return rpc.TLS{CertFile: p + ".crt", KeyFile: p + ".key", CAFile: l.inner.CertFile()}
}

// kubeconfig is how one user reaches the gateway.
type kubeconfig struct {
	path, leaf, user string
	// service: it is one of authn, authz and admission, whose kubeconfig names the files, which are read again when
	// they have been renewed. Any other holds all that it takes.
	service bool
}

func (l *layout) write(k kubeconfig) (err error) {
	cluster := map[string]any{"server": "https://" + net.JoinHostPort(l.address, strconv.Itoa(l.port))}
	who := map[string]any{}
	set := func(in map[string]any, key, file string) {
		if k.service {
			in[key] = file
			return
		}
		b, rerr := os.ReadFile(file)
		if rerr != nil {
			err = rerr
		}
		in[key+"-data"] = base64.StdEncoding.EncodeToString(b)
	}
	ca := l.ca
	if k.service {
		ca, cluster["tls-server-name"] = l.inner, edge.ServicesName
	}
	set(cluster, "certificate-authority", ca.CertFile())
	set(who, "client-certificate", filepath.Join(l.pki(), k.leaf+".crt"))
	set(who, "client-key", filepath.Join(l.pki(), k.leaf+".key"))
	if err != nil {
		return err
	}
	return writeYAML(k.path, map[string]any{
		"apiVersion":      "v1",
		"kind":            "Config",
		"current-context": "watershed",
		"clusters":        []any{map[string]any{"name": "watershed", "cluster": cluster}},
		"users":           []any{map[string]any{"name": k.user, "user": who}},
		"contexts": []any{map[string]any{
			"name":    "watershed",
			"context": map[string]any{"cluster": "watershed", "user": k.user},
		}},
		"preferences": map[string]any{},
	})
}

func writeYAML(path string, doc any) error {
	b, err := yaml.Marshal(doc)
	if err != nil {
		return err
	}
	return pki.WriteFile(path, b, 0o600)
}

const issuer = "https://kubernetes.default.svc.cluster.local"

// settings are a service's, by flag name, as this directory's cluster has them.
func (l *layout) settings(name string) map[string]any {
	p := func(f string) string { return filepath.Join(l.pki(), f) }
	requestHeader := map[string]any{
		"client-ca-file":               l.ca.CertFile(),
		"requestheader-client-ca-file": p("front-proxy-ca.crt"),
	}
	switch name {
	case "registry":
		return with(requestHeader, map[string]any{
			"service-account-signing-key-file": p("sa.key"),
			"service-account-issuer":           issuer,
			"secure-port":                      l.port,
			"requestheader-allowed-names":      "front-proxy-client",
			"allow-privileged":                 true,
			"proxy-client-cert-file":           p("front-proxy-client.crt"),
			"proxy-client-key-file":            p("front-proxy-client.key"),
			"kubelet-client-certificate":       p("apiserver-kubelet-client.crt"),

			"kubelet-client-key": p("apiserver-kubelet-client.key"),
		})
	case "authn":
		return with(requestHeader, map[string]any{
			"service-account-key-file":       p("sa.pub"),
			"service-account-issuer":         issuer,
			"requestheader-allowed-names":    "front-proxy-client",
			"requestheader-username-headers": "X-Remote-User",
			"requestheader-group-headers":    "X-Remote-Group",

			"requestheader-extra-headers-prefix": "X-Remote-Extra-",
			"enable-bootstrap-token-auth":        true,
			"kubeconfig":                         l.kubeconfigOf(name),
			"services-client-ca-file":            l.inner.CertFile(),
		})
	case "authz", "admission":
		return map[string]any{"kubeconfig": l.kubeconfigOf(name)}
	case "gateway":
		return with(requestHeader, map[string]any{
			"tls-cert-file":                 p("apiserver.crt"),
			"tls-private-key-file":          p("apiserver.key"),
			"services-tls-cert-file":        p("inner-gateway.crt"),
			"services-tls-private-key-file": p("inner-gateway.key"),
			"services-client-ca-file":       l.inner.CertFile(),
			"secure-port":                   l.port,
			"api-audiences":                 issuer,
			"proxy-client-cert-file":        p("front-proxy-client.crt"),
			"proxy-client-key-file":         p("front-proxy-client.key"),
			"kubelet-client-certificate":    p("apiserver-kubelet-client.crt"),
			"kubelet-client-key":            p("apiserver-kubelet-client.key"),
		})
	}
	return map[string]any{}
}
