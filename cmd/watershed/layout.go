package main

import (
	"encoding/base64"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/rpc"
)

// layout is a data directory: everything that a cluster on this machine is.
type layout struct {
	dir  string
	lock *os.File
	ca   *pki.CA
	// inner signs the services' identities among themselves; a client of the cluster can have none of these.
	inner *pki.CA
	port  int
	hosts []string
}

// openLayout takes the directory for this process and makes what is missing.
func openLayout(dir string, port int, hosts []string) (*layout, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	l := &layout{dir: dir, port: port, hosts: hosts}
	if l.lock, err = os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	if err := unix.Flock(int(l.lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		pid, _ := os.ReadFile(l.lock.Name())
		return nil, fmt.Errorf("--data-dir %q is in use by process %s; stop it or choose another directory", dir, strings.TrimSpace(string(pid)))
	}
	_ = l.lock.Truncate(0)
	_, _ = l.lock.WriteAt(fmt.Appendf(nil, "%d\n", os.Getpid()), 0)
	return l, l.certificates()
}

// close gives the directory up. Until then the lock's file must be held on to: once nothing refers to it, it is closed.
func (l *layout) close() { _ = l.lock.Close() }

func (l *layout) pki() string { return filepath.Join(l.dir, "pki") }

func (l *layout) certificates() (err error) {
	if l.ca, err = pki.OpenCA(l.pki(), "ca", "kubernetes"); err != nil {
		return err
	}
	if l.inner, err = pki.OpenCA(l.pki(), "inner-ca", "watershed-inner"); err != nil {
		return err
	}
	frontProxy, err := pki.OpenCA(l.pki(), "front-proxy-ca", "front-proxy-ca")
	if err != nil {
		return err
	}
	if _, _, err := frontProxy.Leaf("front-proxy-client", "front-proxy-client", nil, nil); err != nil {
		return err
	}
	if _, _, err := pki.ServiceAccountKeys(l.pki()); err != nil {
		return err
	}
	names := append([]string{"kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", "10.96.0.1"}, l.hosts...)
	if _, _, err := l.ca.Leaf("apiserver", "kube-apiserver", nil, names); err != nil {
		return err
	}
	if _, _, err := l.ca.Leaf("apiserver-kubelet-client", "kube-apiserver-kubelet-client", []string{"system:masters"}, nil); err != nil {
		return err
	}
	if err := l.kubeconfig(filepath.Join(l.dir, "admin.kubeconfig"), "admin", "kubernetes-admin"); err != nil {
		return err
	}
	for _, name := range []string{"authn", "authz", "admission"} {
		if err := l.kubeconfig(l.kubeconfigOf(name), "client-"+name, "system:watershed:"+name); err != nil {
			return err
		}
	}
	for _, name := range append([]string{"etcd", "nats"}, order...) {
		if _, _, err := l.inner.Leaf("inner-"+name, name, nil, []string{name, "localhost", "127.0.0.1"}); err != nil {
			return err
		}
	}
	return nil
}

func (l *layout) kubeconfigOf(name string) string { return filepath.Join(l.pki(), name+".kubeconfig") }

// identity is a service's on the inner network.
func (l *layout) identity(name string) rpc.TLS {
	p := filepath.Join(l.pki(), "inner-"+name)
	return rpc.TLS{CertFile: p + ".crt", KeyFile: p + ".key", CAFile: l.inner.CertFile()}
}

// kubeconfig writes a self-contained kubeconfig for a user of the privileged group.
func (l *layout) kubeconfig(path, leaf, user string) error {
	crt, key, err := l.ca.Leaf(leaf, user, []string{"system:masters"}, nil)
	if err != nil {
		return err
	}
	data := func(f string) string {
		b, rerr := os.ReadFile(f)
		if rerr != nil {
			err = rerr
		}
		return base64.StdEncoding.EncodeToString(b)
	}
	doc := map[string]any{"apiVersion": "v1", "kind": "Config", "current-context": "watershed",
		"clusters":    []any{map[string]any{"name": "watershed", "cluster": map[string]any{"server": fmt.Sprintf("https://127.0.0.1:%d", l.port), "certificate-authority-data": data(l.ca.CertFile())}}},
		"users":       []any{map[string]any{"name": user, "user": map[string]any{"client-certificate-data": data(crt), "client-key-data": data(key)}}},
		"contexts":    []any{map[string]any{"name": "watershed", "context": map[string]any{"cluster": "watershed", "user": user}}},
		"preferences": map[string]any{}}
	if err != nil {
		return err
	}
	return writeYAML(path, doc)
}

func writeYAML(path string, doc any) error {
	b, err := yaml.Marshal(doc)
	if err != nil {
		return err
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}

const issuer = "https://kubernetes.default.svc.cluster.local"

// settings are a service's, by flag name, as this directory's cluster has them.
func (l *layout) settings(name string) map[string]any {
	p := func(f string) string { return filepath.Join(l.pki(), f) }
	requestHeader := map[string]any{"client-ca-file": l.ca.CertFile(), "requestheader-client-ca-file": p("front-proxy-ca.crt")}
	merge := func(more map[string]any) map[string]any {
		for k, v := range requestHeader {
			more[k] = v
		}
		return more
	}
	switch name {
	case "registry":
		return merge(map[string]any{"service-account-signing-key-file": p("sa.key"), "service-account-issuer": issuer, "secure-port": l.port,
			"requestheader-allowed-names": "front-proxy-client", "allow-privileged": true,
			"proxy-client-cert-file": p("front-proxy-client.crt"), "proxy-client-key-file": p("front-proxy-client.key"),
			"kubelet-client-certificate": p("apiserver-kubelet-client.crt"), "kubelet-client-key": p("apiserver-kubelet-client.key")})
	case "authn":
		return merge(map[string]any{"service-account-key-file": p("sa.pub"), "service-account-issuer": issuer, "requestheader-allowed-names": "front-proxy-client",
			"requestheader-username-headers": "X-Remote-User", "requestheader-group-headers": "X-Remote-Group", "requestheader-extra-headers-prefix": "X-Remote-Extra-",
			"enable-bootstrap-token-auth": true, "kubeconfig": l.kubeconfigOf(name)})
	case "authz", "admission":
		return map[string]any{"kubeconfig": l.kubeconfigOf(name)}
	case "gateway":
		return merge(map[string]any{"tls-cert-file": p("apiserver.crt"), "tls-private-key-file": p("apiserver.key"), "secure-port": l.port, "api-audiences": issuer,
			"proxy-client-cert-file": p("front-proxy-client.crt"), "proxy-client-key-file": p("front-proxy-client.key"),
			"kubelet-client-certificate": p("apiserver-kubelet-client.crt"), "kubelet-client-key": p("apiserver-kubelet-client.key")})
	}
	return map[string]any{}
}
