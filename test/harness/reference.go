package harness

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"k8s.io/client-go/rest"

	"watershed.dev/platform/porttest"
)

// Reference is a kube-apiserver process.
type Reference struct {
	*Server
	// Etcd is the URL of its etcd.
	Etcd string
	// Program is kube-apiserver, or a link of this name to Watershed.
	Program string
	args    []string
}

// KubeAPIServer starts kube-apiserver on an etcd, with its own certificates and with more flags.
func KubeAPIServer(t testing.TB, dir, etcd string, flags ...string) *Reference {
	t.Helper()
	r := newReference(t, dir, etcd, Peer("kube-apiserver"), flags)
	r.waitUntilReady()
	return r
}

// Link starts Watershed by a link called kube-apiserver on a fresh etcd, with the flags of Oracle.
func Link(t testing.TB, flags ...string) *Reference {
	t.Helper()
	dir := TempDir(t)
	link := filepath.Join(dir, "kube-apiserver")
	if err := os.Symlink(Watershed(), link); err != nil {
		t.Fatal(err)
	}
	r := newReference(t, dir, Etcd(t, dir), link, flags)
	r.waitUntilReady()
	return r
}

// newReference starts a program, and does not wait until it is ready.
func newReference(t testing.TB, dir, etcd, program string, flags []string) *Reference {
	t.Helper()
	s := &Server{
		t:          t,
		Dir:        dir,
		Port:       porttest.FreePort(t),
		Kubeconfig: filepath.Join(dir, "reference.kubeconfig"),
		SAKey:      filepath.Join(dir, "pki", "sa.key"),
		CA:         filepath.Join(dir, "pki", "ca"),
	}
	p := func(f string) string { return filepath.Join(dir, "pki", f) }
	if _, err := os.Stat(p("ca.crt")); err != nil {
		makePKI(t, filepath.Join(dir, "pki"))
	}
	conf := fmt.Sprintf(
		`{"apiVersion":"v1","kind":"Config","current-context":"x",
"clusters":[{"name":"c","cluster":{"server":"https://127.0.0.1:%d","insecure-skip-tls-verify":true}}],
"users":[{"name":"u","user":{"client-certificate":%q,"client-key":%q}}],
"contexts":[{"name":"x","context":{"cluster":"c","user":"u"}}]}`,
		s.Port,
		p("admin.crt"),
		p("admin.key"),
	)
	if err := os.WriteFile(s.Kubeconfig, []byte(conf), 0o600); err != nil {
		t.Fatal(err)
	}
	own := []string{"--etcd-servers=" + etcd, "--secure-port=" + fmt.Sprint(s.Port), "--bind-address=127.0.0.1",
		"--cert-dir=" + filepath.Join(dir, "certs")}
	r := &Reference{s, etcd, program, slices.Concat(own, clusterFlags(dir, flags))}
	r.start()
	if program == Peer("kube-apiserver") { // its stop takes up to a minute if clients watch, and no test covers it
		t.Cleanup(func() { r.process.Kill() })
	}
	return r
}

// clusterFlags returns flags for kube-apiserver and for Watershed. Both then serve a cluster with the certificates and
// keys of dir/pki. A flag of more replaces the flag of the same name.
func clusterFlags(dir string, more []string) []string {
	p := func(f string) string { return filepath.Join(dir, "pki", f) }
	flags := []string{
		"--client-ca-file=" + p("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc.cluster.local",
		"--service-account-key-file=" + p("sa.pub"),
		"--service-account-signing-key-file=" + p("sa.key"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction", // as up has it
		"--service-cluster-ip-range=10.96.0.0/16",
		"--allow-privileged=true",
		"--advertise-address=192.0.2.1",
	}
	if _, err := os.Stat(p("serving.crt")); err == nil {
		flags = append(flags,
			"--tls-cert-file="+p("serving.crt"),
			"--tls-private-key-file="+p("serving.key"),
			"--kubelet-client-certificate="+p("admin.crt"),
			"--kubelet-client-key="+p("admin.key"),
			"--requestheader-client-ca-file="+p("ca.crt"),
			"--requestheader-allowed-names=front-proxy-client",
			"--requestheader-username-headers=X-Remote-User",
			"--requestheader-group-headers=X-Remote-Group",
			"--requestheader-extra-headers-prefix=X-Remote-Extra-",
			"--proxy-client-cert-file="+p("front-proxy.crt"),
			"--proxy-client-key-file="+p("front-proxy.key"))
	}
	flags = slices.DeleteFunc(flags, func(f string) bool {
		name, _, _ := strings.Cut(f, "=")
		return slices.ContainsFunc(more, func(m string) bool {
			given, _, _ := strings.Cut(m, "=")
			return given == name || replaces[given] == name
		})
	})
	for _, m := range more { // a flag without a value only removes the flag of its name
		if !strings.HasSuffix(m, "=") {
			flags = append(flags, m)
		}
	}
	return flags
}

// replaces maps a flag to the flag that cannot be set beside it.
var replaces = map[string]string{"--authorization-config": "--authorization-mode"}

// UsedTwins returns Twins with stores that both servers have already served without flags.
func UsedTwins(t testing.TB, flags ...string) (theirs, ours *Server) {
	t.Helper()
	dir := TempDir(t)
	etcd := Etcd(t, dir)
	first := KubeAPIServer(t, dir, etcd)
	client := first.Client()
	Eventually(t, Soon, func() error { // the last object that it creates for itself
		_, err := client.SchedulingV1().PriorityClasses().Get(t.Context(), "system-node-critical", metav1.GetOptions{})
		return err
	})
	first.Stop()
	ours = Up(t, "", clusterFlags(dir, nil)...)
	ours.Stop()
	return twins(t, dir, etcd, ours.Dir, flags)
}

// Twins starts kube-apiserver and Watershed with the same certificates, keys and flags, each on a fresh etcd.
func Twins(t testing.TB, flags ...string) (theirs, ours *Server) {
	t.Helper()
	dir := TempDir(t)
	return twins(t, dir, Etcd(t, dir), "", flags)
}

// Side is a placeholder in a flag of Twins for the server's own name, kube-apiserver or watershed.
const Side = "{side}"

func twins(t testing.TB, dir, etcd, data string, flags []string) (theirs, ours *Server) {
	t.Helper()
	flagsFor := func(side string) []string {
		own := slices.Clone(flags)
		for i := range own {
			own[i] = strings.ReplaceAll(own[i], Side, side)
		}
		return own
	}
	reference := newReference(t, dir, etcd, Peer("kube-apiserver"), flagsFor("kube-apiserver"))
	ours = Up(t, data, clusterFlags(dir, flagsFor("watershed"))...)
	ours.adopt(reference.Server)
	reference.waitUntilReady()
	return reference.Server, ours
}

// adopt makes the clients of s use the certificates and keys of another server.
func (s *Server) adopt(other *Server) {
	s.t.Helper()
	conf, err := os.ReadFile(other.Kubeconfig)
	if err != nil {
		s.t.Fatal(err)
	}
	s.Kubeconfig = filepath.Join(s.Dir, "twin.kubeconfig")
	conf = bytes.Replace(conf, fmt.Appendf(nil, ":%d", other.Port), fmt.Appendf(nil, ":%d", s.Port), 1)
	if err := os.WriteFile(s.Kubeconfig, conf, 0o600); err != nil {
		s.t.Fatal(err)
	}
	s.CA, s.SAKey = other.CA, other.SAKey
}

// Beside starts `up` in dir ("" for a new directory) with more flags, as another API server of the same cluster. It has
// the etcd, the certificates and the keys of s.
func (s *Reference) Beside(dir string, flags ...string) *Server {
	s.t.Helper()
	up := Up(s.t, dir, append(clusterFlags(s.Dir, flags), "--etcd-servers="+s.Etcd)...)
	up.adopt(s.Server)
	return up
}

// Restart starts the stopped kube-apiserver with the same arguments, and waits until it is ready.
func (s *Reference) Restart() {
	s.t.Helper()
	s.start()
	s.waitUntilReady()
}

func (s *Reference) start() {
	s.process = Start(s.t, s.Dir, "kube-apiserver", s.Program, s.args...)
}

func (s *Reference) waitUntilReady() {
	s.t.Helper()
	client, err := rest.HTTPClientFor(s.Config())
	if err != nil {
		s.t.Fatal(err)
	}
	client.Timeout = 5 * time.Second
	Eventually(s.t, Soon, func() error {
		return get(client, fmt.Sprintf("https://127.0.0.1:%d/readyz", s.Port))
	})
}

// Manifest returns the manifest of this kube-apiserver as a static pod, in the form that kubeadm writes.
func (s *Reference) Manifest() string {
	type object = map[string]any
	containers := []object{{"name": "kube-apiserver", "command": append([]string{"kube-apiserver"}, s.args...)}}
	text, err := json.MarshalIndent(object{
		"apiVersion": "v1",
		"kind":       "Pod",
		"metadata":   object{"name": "kube-apiserver", "namespace": "kube-system"},
		"spec":       object{"containers": containers},
	}, "", "  ")
	if err != nil {
		s.t.Fatal(err)
	}
	return string(text)
}

// Oracle starts kube-apiserver on a fresh etcd, with more flags.
func Oracle(t testing.TB, flags ...string) *Server {
	dir := TempDir(t)
	return KubeAPIServer(t, dir, Etcd(t, dir), flags...).Server
}

func makePKI(t testing.TB, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	fail := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	write := func(name, kind string, der []byte) {
		fail(os.WriteFile(filepath.Join(dir, name), pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600))
	}
	key := func(name string) *ecdsa.PrivateKey {
		k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		fail(err)
		der, err := x509.MarshalECPrivateKey(k)
		fail(err)
		write(name, "EC PRIVATE KEY", der)
		return k
	}
	cert := func(cn string, orgs []string, ca bool) *x509.Certificate {
		return &x509.Certificate{
			SerialNumber:          big.NewInt(time.Now().UnixNano()),
			Subject:               pkix.Name{CommonName: cn, Organization: orgs},
			NotBefore:             time.Now().Add(-time.Hour),
			NotAfter:              time.Now().Add(24 * time.Hour),
			IsCA:                  ca,
			BasicConstraintsValid: true,

			KeyUsage:    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
			ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
		}
	}
	caKey, ca := key("ca.key"), cert("ca", nil, true)
	ca.ExtKeyUsage = nil
	der, err := x509.CreateCertificate(rand.Reader, ca, ca, &caKey.PublicKey, caKey)
	fail(err)
	write("ca.crt", "CERTIFICATE", der)
	adminKey, admin := key("admin.key"), cert("admin", []string{"system:masters"}, false)
	der, err = x509.CreateCertificate(rand.Reader, admin, ca, &adminKey.PublicKey, caKey)
	fail(err)
	write("admin.crt", "CERTIFICATE", der)
	for name, c := range map[string]*x509.Certificate{
		"serving":     cert("kube-apiserver", nil, false),
		"front-proxy": cert("front-proxy-client", nil, false),
	} {
		if name == "serving" {
			c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
			c.DNSNames = []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc",
				"kubernetes.default.svc.cluster.local", "localhost"}
			c.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1), net.IPv4(10, 96, 0, 1), net.IPv4(10, 99, 0, 1)}
		}
		k := key(name + ".key")
		der, err = x509.CreateCertificate(rand.Reader, c, ca, &k.PublicKey, caKey)
		fail(err)
		write(name+".crt", "CERTIFICATE", der)
	}
	sa := key("sa.key")
	pub, err := x509.MarshalPKIXPublicKey(&sa.PublicKey)
	fail(err)
	write("sa.pub", "PUBLIC KEY", pub)
}
