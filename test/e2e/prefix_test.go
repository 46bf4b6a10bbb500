package e2e

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// guardedEtcd is an etcd with RBAC. Each client has a certificate.
type guardedEtcd struct {
	t   *testing.T
	url string
	ca  *pki.CA
}

func newGuardedEtcd(t *testing.T) *guardedEtcd {
	dir := harness.TempDir(t)
	ca, err := pki.OpenCA(dir, "etcd-ca", "etcd-ca")
	if err != nil {
		t.Fatal(err)
	}
	e := &guardedEtcd{t: t, url: fmt.Sprintf("https://127.0.0.1:%d", porttest.FreePort(t)), ca: ca}
	crt, key := e.leaf("server", pki.Server|pki.Client)
	peer := fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t))
	health := fmt.Sprintf("http://127.0.0.1:%d", porttest.FreePort(t))
	harness.Start(t, dir, "etcd", harness.Peer("etcd"), "--name", "e", "--data-dir", filepath.Join(dir, "data"),
		"--listen-client-urls", e.url, "--advertise-client-urls", e.url, "--listen-metrics-urls", health,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "e="+peer,
		"--client-cert-auth", "--trusted-ca-file", ca.CertFile(), "--cert-file", crt, "--key-file", key,
		"--log-level", "error")
	harness.Eventually(t, harness.Soon, func() error {
		resp, err := http.Get(health + "/health")
		if err == nil {
			resp.Body.Close()
		}
		return err
	})
	e.ctl("user", "add", "root", "--no-password")
	e.ctl("user", "grant-role", "root", "root")
	e.ctl("auth", "enable")
	return e
}

func (e *guardedEtcd) leaf(user string, usage pki.Usage) (crt, key string) {
	e.t.Helper()
	crt, key, _, err := e.ca.Leaf(pki.Leaf{
		Name:       "etcd-" + user,
		CommonName: user,
		SANs:       []string{"127.0.0.1"},
		Usage:      usage,
	})
	if err != nil {
		e.t.Fatal(err)
	}
	return crt, key
}

// ctl runs etcdctl as root.
func (e *guardedEtcd) ctl(args ...string) string {
	e.t.Helper()
	crt, key := e.leaf("root", pki.Client)
	out, err := harness.Etcdctl(append([]string{"--endpoints", e.url, "--cacert", e.ca.CertFile(),
		"--cert", crt, "--key", key}, args...)...).CombinedOutput()
	if err != nil {
		e.t.Fatalf("etcdctl %q: %v\n%s", args, err, out)
	}
	return string(out)
}

// tenant grants a user the keys of a prefix alone, and returns the flags of its API server.
func (e *guardedEtcd) tenant(prefix string) []string {
	user := strings.Trim(prefix, "/")
	e.ctl("user", "add", user, "--no-password")
	e.ctl("role", "add", user)
	e.ctl("role", "grant-permission", user, "--prefix=true", "readwrite", prefix+"/")
	e.ctl("user", "grant-role", user, user)
	crt, key := e.leaf(user, pki.Client)
	return []string{"--etcd-servers=" + e.url, "--etcd-cafile=" + e.ca.CertFile(), "--etcd-certfile=" + crt,
		"--etcd-keyfile=" + key, "--etcd-prefix=" + prefix, "--etcd-compaction-interval=0"}
}

// Two control planes share an etcd, which grants each only its prefix. kube-apiserver made the second. Both serve
// watches, neither sees the other's objects, and no key is outside of the prefixes.
func TestControlPlanesShareEtcdByPrefix(t *testing.T) {
	t.Parallel()
	etcd := newGuardedEtcd(t)
	first := harness.Up(t, "", etcd.tenant("/first")...)
	dir, flags := harness.TempDir(t), etcd.tenant("/second")
	reference := harness.KubeAPIServer(t, dir, etcd.url, flags...)
	reference.Kubectl("create", "configmap", "kept")
	reference.Stop()
	second := harness.Up(t, "", flags...)
	second.Kubectl("get", "configmap", "kept")

	ctx, cancel := context.WithTimeout(t.Context(), harness.Soon)
	defer cancel()
	servers := map[string]*harness.Server{"first": first, "second": second}
	watches := map[string]watch.Interface{}
	for name, s := range servers {
		w, err := s.Client().CoreV1().ConfigMaps("default").Watch(ctx, metav1.ListOptions{
			LabelSelector: "prefix", TimeoutSeconds: new(int64(harness.Soon.Seconds()))})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Stop()
		watches[name] = w
	}
	for name, s := range servers {
		for i := range 3 {
			if _, err := s.Client().CoreV1().ConfigMaps("default").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprint(name, i), Labels: map[string]string{"prefix": name}}}, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
		}
	}
	for name, w := range watches {
		for i := range 3 {
			select {
			case e := <-w.ResultChan():
				if cm, ok := e.Object.(*corev1.ConfigMap); !ok || cm.Name != fmt.Sprint(name, i) {
					t.Errorf("%s: event %d is %v", name, i, e)
				}
			case <-ctx.Done():
				t.Fatalf("%s: no event %d", name, i)
			}
		}
	}
	for _, key := range strings.Fields(etcd.ctl("get", "", "--from-key", "--keys-only")) {
		if !strings.HasPrefix(key, "/first/") && !strings.HasPrefix(key, "/second/") {
			t.Errorf("a key outside of the prefixes: %s", key)
		}
	}
}
