package certgen

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"watershed.dev/platform/pki"
)

func secretsOf(t *testing.T, c *fake.Clientset) map[string]map[string][]byte {
	t.Helper()
	list, err := c.CoreV1().Secrets("ws").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]map[string][]byte{}
	for _, s := range list.Items {
		all[s.Name] = s.Data
	}
	return all
}

// The first run creates everything, the second writes nothing. A later run repairs only missing or changed Secrets.
func TestSecretsAreMadeOnceAndMended(t *testing.T) {
	client := fake.NewClientset()
	c := &Config{Namespace: "ws", MountPath: "/etc/watershed/pki", Hosts: []string{"api.example.com"}, Port: 6443}
	secrets := client.CoreV1().Secrets("ws")
	first, err := c.Run(t.Context(), secrets)
	if err != nil || len(first) != len(podSecrets)+1 {
		t.Fatalf("%q, %v", first, err)
	}
	before := secretsOf(t, client)
	if again, err := c.Run(t.Context(), secrets); err != nil || len(again) != 0 {
		t.Errorf("written again: %q, %v", again, err)
	}
	if err := secrets.Delete(t.Context(), "watershed-authn", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	altered, err := secrets.Get(t.Context(), "watershed-nats", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	altered.Data["inner-nats.crt"] = []byte("odd")
	if _, err := secrets.Update(t.Context(), altered, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	mended, err := c.Run(t.Context(), secrets)
	if err != nil || !slices.Equal(mended, []string{"watershed-authn", "watershed-nats"}) {
		t.Errorf("mended: %q, %v", mended, err)
	}
	after := secretsOf(t, client)
	for name, data := range before {
		for f, b := range data {
			if string(after[name][f]) != string(b) {
				t.Errorf("%s of %s is another", f, name)
			}
		}
	}
}

// Run does not recreate the PKI Secret while other Secrets exist. Its error names the missing Secret.
func TestALostAuthorityIsNotReplaced(t *testing.T) {
	for desc, lose := range map[string]func(s *corev1.Secret){
		"all":    func(s *corev1.Secret) { s.Data = nil },
		"ca.crt": func(s *corev1.Secret) { delete(s.Data, "ca.crt") },
		"ca.key": func(s *corev1.Secret) { delete(s.Data, "ca.key") },
		"sa.key": func(s *corev1.Secret) { delete(s.Data, "sa.key") },
		"sa.pub": func(s *corev1.Secret) { delete(s.Data, "sa.pub") },
	} {
		client := fake.NewClientset()
		c := &Config{Namespace: "ws", MountPath: "/mnt"}
		secrets := client.CoreV1().Secrets("ws")
		if _, err := c.Run(t.Context(), secrets); err != nil {
			t.Fatal(err)
		}
		s, err := secrets.Get(t.Context(), pkiSecret, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		lose(s)
		if _, err := secrets.Update(t.Context(), s, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		before := secretsOf(t, client)
		if changed, err := c.Run(t.Context(), secrets); err == nil || len(changed) > 0 {
			t.Errorf("without %s: %q, %v", desc, changed, err)
		}
		after := secretsOf(t, client)
		for name, data := range before {
			for f, b := range data {
				if string(after[name][f]) != string(b) {
					t.Errorf("without %s: %s of %s is another", desc, f, name)
				}
			}
		}
	}
}

// A pod's Secret has no key of a CA, and only the identities of the services in its process.
func TestAPodGetsItsOwnKeysAlone(t *testing.T) {
	client := fake.NewClientset()
	c := &Config{Namespace: "ws", MountPath: "/mnt", Port: 443}
	if _, err := c.Run(t.Context(), client.CoreV1().Secrets("ws")); err != nil {
		t.Fatal(err)
	}
	for name, data := range secretsOf(t, client) {
		services := []string{strings.TrimPrefix(name, "watershed-")}
		switch services[0] {
		case "pki", "admin":
			continue
		case "front":
			services = []string{"gateway", "authn", "authz", "admission", "registry"}
		}
		for f := range data {
			identity, isKey := strings.CutSuffix(f, ".key")
			identity, isIdentity := strings.CutPrefix(identity, "inner-")
			if strings.HasSuffix(f, "ca.key") || isKey && isIdentity && !slices.Contains(services, identity) {
				t.Errorf("%s holds %s", name, f)
			}
		}
		for _, service := range services {
			checkIdentity(t, service, data)
		}
	}
}

// checkIdentity checks a service's certificate and kubeconfig in a Secret.
func checkIdentity(t *testing.T, service string, data map[string][]byte) {
	t.Helper()
	pair, err := tls.X509KeyPair(data["inner-"+service+".crt"], data["inner-"+service+".key"])
	if err != nil {
		t.Errorf("%s: %v", service, err)
		return
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(data["inner-ca.crt"])
	if _, err := pair.Leaf.Verify(x509.VerifyOptions{DNSName: service, Roots: pool}); err != nil {
		t.Errorf("%s: %v", service, err)
	}
	if service == "etcd" {
		for _, host := range []string{"etcd-2.etcd", "etcd-2.etcd.ws.svc"} {
			if err := pair.Leaf.VerifyHostname(host); err != nil {
				t.Error(err)
			}
		}
	}
	if conf := data[service+".kubeconfig"]; conf != nil {
		k, err := clientcmd.Load(conf)
		if err != nil || k.Clusters["watershed"].Server != "https://gateway-internal:6443" ||
			k.Clusters["watershed"].CertificateAuthority != "/mnt/inner-ca.crt" {
			t.Errorf("%s: %v\n%s", service, err, conf)
		}
	}
}

// A pod's Secret has exactly the files that the pod's arguments and its kubeconfig name.
func TestSecretsHaveTheFilesThatPodsName(t *testing.T) {
	client := fake.NewClientset()
	c := &Config{Namespace: "ws", MountPath: "/etc/watershed/pki"}
	if _, err := c.Run(t.Context(), client.CoreV1().Secrets("ws")); err != nil {
		t.Fatal(err)
	}
	secrets := secretsOf(t, client)
	manifests, err := filepath.Glob("../../deploy/k8s/rendered/*.yaml")
	if err != nil || len(manifests) == 0 {
		t.Fatalf("no manifests: %v", err)
	}
	mounts := regexp.MustCompile("secretName: (watershed-[a-z]+)")
	targets := regexp.MustCompile("--target=([a-z,]+)")
	named := regexp.MustCompile("/etc/watershed/pki/([a-z.-]+)")
	for _, manifest := range manifests {
		text, err := os.ReadFile(manifest)
		if err != nil {
			t.Fatal(err)
		}
		for _, pod := range strings.Split(string(text), "\n---\n") {
			mounted := mounts.FindStringSubmatch(pod)
			if mounted == nil {
				continue
			}
			text := pod
			if of := targets.FindStringSubmatch(pod); of != nil {
				for _, service := range strings.Split(of[1], ",") {
					text += strings.ReplaceAll(pod, "{service}", service)
				}
			}
			files := slices.Sorted(maps.Keys(secrets[mounted[1]]))
			for _, f := range files {
				if strings.HasSuffix(f, ".kubeconfig") {
					text += string(secrets[mounted[1]][f])
				}
			}
			var want []string
			for _, m := range named.FindAllStringSubmatch(text, -1) {
				if m[1] != "inner-" { // of inner-{service}
					want = append(want, m[1])
				}
			}
			slices.Sort(want)
			if want = slices.Compact(want); !slices.Equal(files, want) {
				t.Errorf("%s: %s has %q, and its pod names %q", manifest, mounted[1], files, want)
			}
		}
	}
}

// The PKI of an existing cluster is imported unchanged.
func TestAPKIIsImported(t *testing.T) {
	dir := t.TempDir()
	if _, err := pki.OpenCA(dir, "ca", "theirs"); err != nil {
		t.Fatal(err)
	}
	if _, _, err := pki.ServiceAccountKeys(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(t.TempDir(), filepath.Join(dir, "..data")); err != nil { // as in a mounted Secret
		t.Fatal(err)
	}
	client := fake.NewClientset()
	c := &Config{Namespace: "ws", ImportDir: dir}
	if _, err := c.Run(t.Context(), client.CoreV1().Secrets("ws")); err != nil {
		t.Fatal(err)
	}
	all := secretsOf(t, client)
	for name, files := range map[string][]string{
		"watershed-gateway":  {"ca.crt"},
		"watershed-registry": {"ca.crt", "sa.key"},
		"watershed-authn":    {"sa.pub"},
	} {
		for _, f := range files {
			want, err := os.ReadFile(filepath.Join(dir, f))
			if err != nil || string(all[name][f]) != string(want) {
				t.Errorf("%s of %s is not the one that was imported: %v", f, name, err)
			}
		}
	}
	c.ImportDir = "/does/not/exist"
	if _, err := c.Run(t.Context(), fake.NewClientset().CoreV1().Secrets("ws")); err == nil ||
		!strings.Contains(err.Error(), "--import-dir") {
		t.Errorf("%v", err)
	}
}

// Of two concurrent runs, the second uses the files of the first.
func TestTwoRunsAgree(t *testing.T) {
	client, other := fake.NewClientset(), fake.NewClientset()
	c := &Config{Namespace: "ws", MountPath: "/mnt"}
	if _, err := c.Run(t.Context(), other.CoreV1().Secrets("ws")); err != nil {
		t.Fatal(err)
	}
	raced := false
	client.PrependReactor("create", "secrets", func(a clienttesting.Action) (bool, runtime.Object, error) {
		s := a.(clienttesting.CreateAction).GetObject().(*corev1.Secret)
		if raced || s.Name != pkiSecret {
			return false, nil, nil
		}
		raced = true
		list, err := other.CoreV1().Secrets("ws").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Error(err)
		}
		for _, made := range list.Items { // by the other run
			if err := client.Tracker().Add(&made); err != nil {
				t.Error(err)
			}
		}
		return true, nil, apierrors.NewAlreadyExists(corev1.Resource("secrets"), pkiSecret)
	})
	changed, err := c.Run(t.Context(), client.CoreV1().Secrets("ws"))
	if err != nil || len(changed) != 0 {
		t.Errorf("%q, %v", changed, err)
	}
}

// A user's kubeconfig keeps the user's changes: a namespace, another cluster, the current context. It gets the
// gateway's address, and no other field stays in the own entries.
func TestAKubeconfigKeepsTheChangesOfItsUser(t *testing.T) {
	p := &PKI{Dir: t.TempDir(), Gateway: "https://a:1", Hosts: []string{"10.96.0.1", "b"}}
	open := func() *clientcmdapi.Config {
		t.Helper()
		if err := p.Open(); err != nil {
			t.Fatal(err)
		}
		c, err := clientcmd.LoadFromFile(p.AdminKubeconfig())
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	edit := open()
	edit.Contexts[ClusterName].Namespace = "dev"
	edit.Clusters["other"] = &clientcmdapi.Cluster{Server: "https://other"}
	edit.Contexts["other"] = &clientcmdapi.Context{Cluster: "other"}
	edit.CurrentContext = "other"
	edit.AuthInfos["kubernetes-admin"].Token = "of another user"
	if err := clientcmd.WriteToFile(*edit, p.AdminKubeconfig()); err != nil {
		t.Fatal(err)
	}
	p.Gateway = "https://c:2"
	got := open()
	if own := got.Contexts[ClusterName]; own.Namespace != "dev" || got.Clusters[own.Cluster].Server != p.Gateway ||
		got.AuthInfos[own.AuthInfo].Token != "" {
		t.Errorf("the own entries are %+v, %+v, %+v", own, got.Clusters, got.AuthInfos)
	}
	if got.CurrentContext != "other" || got.Clusters["other"].Server != "https://other" {
		t.Errorf("the others are %s, %+v", got.CurrentContext, got.Clusters)
	}
	delete(got.Contexts, "other")
	if err := clientcmd.WriteToFile(*got, p.AdminKubeconfig()); err != nil {
		t.Fatal(err)
	}
	if got := open(); got.CurrentContext != ClusterName {
		t.Errorf("the context is %s", got.CurrentContext)
	}
	for _, text := range []string{"contexts: [null, {}, {name: 3}, odd]\nclusters: odd\n", "current-context: ''"} {
		if err := os.WriteFile(p.AdminKubeconfig(), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := open(); got.CurrentContext != ClusterName || len(got.Contexts) != 1 {
			t.Errorf("%s: %+v", text, got)
		}
	}
	if err := os.WriteFile(p.AdminKubeconfig(), []byte("no kubeconfig"), 0o600); err != nil {
		t.Fatal(err)
	}
	open()
	aside, err := filepath.Glob(p.AdminKubeconfig() + ".before-*")
	if err != nil || len(aside) != 1 {
		t.Fatalf("%q, %v", aside, err)
	}
	if text, err := os.ReadFile(aside[0]); string(text) != "no kubeconfig" {
		t.Errorf("the copy is %q, %v", text, err)
	}
}

// sa.pub must have the public key of sa.key. It may have others, of tokens that were signed before.
func TestServiceAccountKeysBelongTogether(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	check := func(want string) {
		t.Helper()
		err := (&PKI{Dir: dir}).Open()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("got %v, not %q", err, want)
		}
	}
	check("")
	check("")
	if err := (&PKI{Dir: other}).Open(); err != nil {
		t.Fatal(err)
	}
	own, err := os.ReadFile(filepath.Join(dir, "sa.pub"))
	if err != nil {
		t.Fatal(err)
	}
	foreign, err := os.ReadFile(filepath.Join(other, "sa.pub"))
	if err != nil {
		t.Fatal(err)
	}
	put := func(keys ...[]byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "sa.pub"), bytes.Join(keys, nil), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put(foreign)
	check("does not have the public key of")
	put(foreign, own)
	check("")
}

// A rotation of a CA has three steps (docs/operators/security.md). Pods with the Secrets before a step and pods with
// the Secrets after it accept each other's certificates.
func TestTheStepsOfACARotation(t *testing.T) {
	client := fake.NewClientset()
	c := &Config{Namespace: "ws", MountPath: "/mnt"}
	secrets := client.CoreV1().Secrets("ws")
	dir := t.TempDir()
	for ca, leaf := range map[string]string{"ca": "apiserver.crt", "inner-ca": "inner-registry.crt"} {
		if _, err := c.Run(t.Context(), secrets); err != nil {
			t.Fatal(err)
		}
		if _, err := pki.OpenCA(dir, ca, "new"); err != nil {
			t.Fatal(err)
		}
		read := func(suffix string) []byte {
			b, err := os.ReadFile(filepath.Join(dir, ca+suffix))
			if err != nil {
				t.Fatal(err)
			}
			return b
		}
		before := secretsOf(t, client)
		oldCA, newCA, first := before[pkiSecret][ca+".crt"], read(".crt"), before["watershed-front"][leaf]
		for step, files := range []map[string][]byte{
			{ca + ".crt": slices.Concat(oldCA, newCA)},
			{ca + ".crt": slices.Concat(newCA, oldCA), ca + ".key": read(".key")},
			{ca + ".crt": newCA},
		} {
			all, err := secrets.Get(t.Context(), pkiSecret, metav1.GetOptions{})
			if err != nil {
				t.Fatal(err)
			}
			maps.Copy(all.Data, files)
			if _, err := secrets.Update(t.Context(), all, metav1.UpdateOptions{}); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Run(t.Context(), secrets); err != nil {
				t.Fatal(err)
			}
			after := secretsOf(t, client)
			front, earlier := after["watershed-front"], before["watershed-front"]
			for _, pair := range [][2]map[string][]byte{{front, front}, {front, earlier}, {earlier, front}} {
				roots := x509.NewCertPool()
				roots.AppendCertsFromPEM(pair[0][ca+".crt"])
				block, _ := pem.Decode(pair[1][leaf])
				cert, err := x509.ParseCertificate(block.Bytes)
				if err != nil {
					t.Fatal(err)
				}
				if _, err := cert.Verify(x509.VerifyOptions{Roots: roots}); err != nil {
					t.Errorf("%s, step %d: %v", ca, step+1, err)
				}
			}
			if same := bytes.Equal(front[leaf], first); same != (step == 0) {
				t.Errorf("%s, step %d: the certificate is the first: %v", ca, step+1, same)
			}
			before = after
		}
	}
}
