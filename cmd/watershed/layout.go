package main

import (
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"watershed.dev/cmd/certgen"
	"watershed.dev/platform/config"
	"watershed.dev/platform/pki"
	"watershed.dev/platform/process"
	"watershed.dev/platform/rpc"
)

// layout is a data directory, which holds all files of a cluster on this machine.
type layout struct {
	dir string
	// sockets is the directory of the sockets.
	sockets string
	lock    *os.File
	logs    logFiles
	pki     *certgen.PKI
	// certDir is --cert-dir, or empty if other flags name the serving certificate.
	certDir string
	// address and port are the endpoint of the gateway.
	address string
	port    int
}

// directory holds the flags of the commands that use a data directory.
type directory struct {
	dataDir string
	certDir string
	hosts   []string
	logs    logFiles
}

func (d *directory) addFlags(fs *pflag.FlagSet) {
	fs.StringVar(&d.dataDir, "data-dir", ".watershed",
		"The directory of all data: certificates, etcd, the event log, admin.kubeconfig, logs.")
	fs.StringVar(&d.certDir, "cert-dir", "",
		"The directory of the serving certificate: apiserver.crt and apiserver.key, self-signed if they do not exist. "+
			"Empty: the CA in --data-dir signs the certificate. --tls-cert-file overrides it.")
	fs.StringSliceVar(&d.hosts, "tls-sans", nil, "Additional names and addresses of the serving certificate.")
	d.logs.addFlags(fs)
}

// open opens the directory. fs also has the gateway's flags.
func (d *directory) open(fs *pflag.FlagSet) (*layout, error) {
	port, _ := fs.GetInt("secure-port")
	bind, _ := fs.GetString("bind-address")
	l, err := openLayout(d.dataDir, bind, port, append(d.hosts, advertised(fs)...), d.logs)
	if err == nil && !fs.Changed("tls-cert-file") && !fs.Changed("tls-private-key-file") {
		l.certDir = d.certDir
	}
	return l, err
}

// openLayout locks the directory for this process and creates missing files. bind and port are the gateway's listen
// address.
func openLayout(dir, bind string, port int, hosts []string, logs logFiles) (*layout, error) {
	if err := logs.validate(); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	resolved, err := process.Resolve(dir)
	if err != nil {
		return nil, fmt.Errorf("--data-dir %q: %w", dir, err)
	}
	dir = resolved
	if process.HasForeignFiles(dir) {
		return nil, fmt.Errorf("--data-dir %q has other files, and only this user may access a data directory: choose "+
			"an empty directory", dir)
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
	if l.lock, err = process.Lock(dir); err != nil {
		return nil, err
	}
	return l, l.pki.Open()
}

// advertised returns the names and addresses that the gateway advertises, and the address of the Service kubernetes.
// Its certificate must include them.
func advertised(fs *pflag.FlagSet) (names []string) {
	for _, ip := range serviceIPs(fs) {
		names = append(names, ip.String())
	}
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

// logName returns the name of this directory's event log in etcd. It is random, because several `up` may share an etcd,
// and each has an event log of its own.
func (l *layout) logName() (string, error) {
	path := filepath.Join(l.dir, "log-name")
	name, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		name = []byte("up-" + strings.ToLower(rand.Text()[:10]))
		err = pki.WriteFile(path, name, 0o600)
	}
	return strings.TrimSpace(string(name)), err
}

func writeYAML(path string, doc any) error {
	b, err := yaml.Marshal(doc)
	if err != nil {
		return err
	}
	return pki.WriteFile(path, b, 0o600)
}

const issuer = "https://kubernetes.default.svc.cluster.local"

// settings returns the settings of the services for the cluster of this directory, by flag name. It omits the settings
// that conflict with flags of the command line. fs has these flags.
func (l *layout) settings(fs *pflag.FlagSet) map[string]any {
	p := l.pki.File
	settings := map[string]any{
		"client-ca-file":               p("ca.crt"),
		"requestheader-client-ca-file": p("front-proxy-ca.crt"),
		"requestheader-allowed-names":  "front-proxy-client",
		"proxy-client-cert-file":       p("front-proxy-client.crt"),
		"proxy-client-key-file":        p("front-proxy-client.key"),
		"kubelet-client-certificate":   p("apiserver-kubelet-client.crt"),
		"kubelet-client-key":           p("apiserver-kubelet-client.key"),
		kubeletCA:                      p("ca.crt"),
		"tls-cert-file":                p("apiserver.crt"),
		"tls-private-key-file":         p("apiserver.key"),

		"requestheader-username-headers":     "X-Remote-User",
		"requestheader-group-headers":        "X-Remote-Group",
		"requestheader-extra-headers-prefix": "X-Remote-Extra-",

		"service-account-key-file":         p("sa.pub"),
		"service-account-signing-key-file": p("sa.key"),
		"service-account-issuer":           issuer,
		"api-audiences":                    issuer,

		"allow-privileged":            true,
		"enable-bootstrap-token-auth": true,
		"enable-admission-plugins":    nodeRestriction, // as kubeadm does
	}
	maps.Copy(settings, l.innerSettings())
	set := func(name string) *pflag.Flag {
		if f := fs.Lookup(name); f != nil && f.Changed && f.Value.String() != "" {
			return f
		}
		return nil
	}
	disabled, _ := fs.GetStringSlice("disable-admission-plugins")
	if slices.Contains(disabled, nodeRestriction) || set("admission-control") != nil {
		delete(settings, "enable-admission-plugins") // conflicts with these flags
	}
	if issuers := set("service-account-issuer"); issuers != nil {
		settings["api-audiences"] = config.FileValue(issuers) // the default of the audiences is the issuers
	}
	if set("service-account-signing-endpoint") != nil { // an external signer signs tokens
		delete(settings, "service-account-key-file")
		delete(settings, "service-account-signing-key-file")
	}
	if l.certDir != "" {
		maps.Copy(settings, l.certSettings())
	}
	if set("client-ca-file") != nil { // the cluster has another PKI, and the CA of its kubelets is unknown
		delete(settings, kubeletCA)
	}
	return settings
}

// innerSettings returns the settings of the connections between the services and the gateway.
func (l *layout) innerSettings() map[string]any {
	return map[string]any{
		"services-tls-cert-file":        l.pki.File("inner-gateway.crt"),
		"services-tls-private-key-file": l.pki.File("inner-gateway.key"),
		"services-client-ca-file":       l.pki.File("inner-ca.crt"),
		"kubeconfig":                    l.pki.Kubeconfig(rpc.ServicePlaceholder),
		"secure-port":                   l.port,
	}
}

// nodeRestriction is the admission plugin that is enabled in addition to kube-apiserver's defaults.
const nodeRestriction = "NodeRestriction"

// kubeletCA is the flag of the CA of kubelets.
const kubeletCA = "kubelet-certificate-authority"
