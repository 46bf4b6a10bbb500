package main

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"
	"sigs.k8s.io/yaml"

	"watershed.dev/cmd/certgen"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
)

// layout is a data directory, which holds all files of a cluster on this machine.
type layout struct {
	dir string
	// sockets is the directory of the sockets.
	sockets string
	lock    *os.File
	logs    logFiles
	pki     *certgen.PKI
	// address and port are the endpoint of the gateway.
	address string
	port    int
}

// openLayout locks the directory for this process and creates missing files. bind and port are the gateway's listen
// address.
func openLayout(dir, bind string, port int, hosts []string, logs logFiles) (*layout, error) {
	if err := logs.validate(); err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	if err := process.RestrictDirectory(dir); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	sockets, err := process.SocketDir(dir)
	if err != nil {
		return nil, err
	}
	l := &layout{dir: dir, sockets: sockets, logs: logs, address: "127.0.0.1", port: port}
	if ip := net.ParseIP(bind); ip != nil && !ip.IsUnspecified() {
		l.address, hosts = bind, append(hosts, bind)
	}
	l.pki = &certgen.PKI{
		Dir:     filepath.Join(dir, "pki"),
		Gateway: certgen.URL(l.address, port),
		Admin:   filepath.Join(dir, "admin.kubeconfig"),
		Hosts:   hosts,
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
	return l, l.pki.Open()
}

// advertised returns the names and addresses that the gateway advertises. Its certificate must include them.
func advertised(fs *pflag.FlagSet) (names []string) {
	for _, flag := range []string{"advertise-address", "external-hostname"} {
		name, _ := fs.GetString(flag)
		if host, _, err := net.SplitHostPort(name); err == nil {
			name = host
		}
		if name != "" {
			names = append(names, name)
		}
	}
	return names
}

// close releases the directory. The lock lasts until its file is closed, and the layout's reference prevents an earlier
// garbage collection of the file.
func (l *layout) close() { _ = l.lock.Close() }

func writeYAML(path string, doc any) error {
	b, err := yaml.Marshal(doc)
	if err != nil {
		return err
	}
	return pki.WriteFile(path, b, 0o600)
}

const issuer = "https://kubernetes.default.svc.cluster.local"

// settingsFor returns the settings of a service without the settings that conflict with flags of the command line.
// fromCommandLine returns the value of a flag as config.FileValue does, or nil if the flag is not set.
func (l *layout) settingsFor(name string, fromCommandLine func(flag string) any) map[string]any {
	settings := l.settings(name)
	isSet := func(flag string) bool { v := fromCommandLine(flag); return v != nil && v != "" }
	disabled, _ := fromCommandLine("disable-admission-plugins").([]string)
	if slices.Contains(disabled, nodeRestriction) || isSet("admission-control") {
		delete(settings, "enable-admission-plugins") // conflicts with these flags
	}
	if issuers := fromCommandLine("service-account-issuer"); issuers != nil && name == "gateway" {
		settings["api-audiences"] = issuers // the default of the audiences is the issuers
	}
	if isSet("service-account-signing-endpoint") { // an external signer signs tokens
		delete(settings, "service-account-key-file")
		delete(settings, "service-account-signing-key-file")
	}
	if isSet("client-ca-file") { // the cluster has another PKI, and the CA of its kubelets is unknown
		delete(settings, kubeletCA)
	}
	return settings
}

// nodeRestriction is the admission plugin that is enabled in addition to kube-apiserver's defaults.
const nodeRestriction = "NodeRestriction"

// kubeletCA is the flag of the CA of kubelets.
const kubeletCA = "kubelet-certificate-authority"

// settings returns the settings of a service for the cluster of this directory, by flag name.
func (l *layout) settings(name string) map[string]any {
	p := l.pki.File
	requestHeader := map[string]any{
		"client-ca-file":               p("ca.crt"),
		"requestheader-client-ca-file": p("front-proxy-ca.crt"),
	}
	switch name {
	case "registry":
		return merge(requestHeader, map[string]any{
			"service-account-signing-key-file": p("sa.key"),
			"service-account-issuer":           issuer,
			"secure-port":                      l.port,
			"requestheader-allowed-names":      "front-proxy-client",
			"allow-privileged":                 true,
			"proxy-client-cert-file":           p("front-proxy-client.crt"),
			"proxy-client-key-file":            p("front-proxy-client.key"),
			"kubelet-client-certificate":       p("apiserver-kubelet-client.crt"),
			"kubelet-client-key":               p("apiserver-kubelet-client.key"),
			kubeletCA:                          p("ca.crt"),
		})
	case "authn":
		return merge(requestHeader, map[string]any{
			"service-account-key-file":       p("sa.pub"),
			"service-account-issuer":         issuer,
			"requestheader-allowed-names":    "front-proxy-client",
			"requestheader-username-headers": "X-Remote-User",
			"requestheader-group-headers":    "X-Remote-Group",

			"requestheader-extra-headers-prefix": "X-Remote-Extra-",
			"enable-bootstrap-token-auth":        true,
			"kubeconfig":                         l.pki.Kubeconfig(name),
			"services-client-ca-file":            p("inner-ca.crt"),
		})
	case "authz":
		return map[string]any{"kubeconfig": l.pki.Kubeconfig(name)}
	case "admission":
		return map[string]any{
			"kubeconfig":               l.pki.Kubeconfig(name),
			"enable-admission-plugins": nodeRestriction, // as kubeadm does
		}
	case "gateway":
		return merge(requestHeader, map[string]any{
			"tls-cert-file":                 p("apiserver.crt"),
			"tls-private-key-file":          p("apiserver.key"),
			"services-tls-cert-file":        p("inner-gateway.crt"),
			"services-tls-private-key-file": p("inner-gateway.key"),
			"services-client-ca-file":       p("inner-ca.crt"),
			"secure-port":                   l.port,
			"api-audiences":                 issuer,
			"proxy-client-cert-file":        p("front-proxy-client.crt"),
			"proxy-client-key-file":         p("front-proxy-client.key"),
			"kubelet-client-certificate":    p("apiserver-kubelet-client.crt"),
			"kubelet-client-key":            p("apiserver-kubelet-client.key"),
			kubeletCA:                       p("ca.crt"),
		})
	}
	return map[string]any{}
}
