package e2e

import (
	"bytes"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/test/harness"
)

// encryption returns the flag of an EncryptionConfiguration for Secrets and custom resources. write writes that file,
// with providers in the given order.
func encryption(t *testing.T) (flag string, write func(providers ...string)) {
	t.Helper()
	file := filepath.Join(harness.TempDir(t), "encryption.json")
	return "--encryption-provider-config=" + file, func(providers ...string) {
		t.Helper()
		text := fmt.Appendf(nil,
			`{"apiVersion":"apiserver.config.k8s.io/v1","kind":"EncryptionConfiguration","resources":[
{"resources":["secrets","things.e2e.example.com"],"providers":[%s]}]}`, strings.Join(providers, ","))
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// written are the etcd keys of the objects that both servers write in
// TestEncryptionAtRestIsKubeAPIServersBothWays.
var written = []string{
	"/registry/secrets/default/ours", "/registry/secrets/default/theirs", "/registry/e2e.example.com/things/default/t",
}

const (
	noEncryption = `{"identity":{}}`
	aKey         = `{"keys":[{"name":"k1","secret":"c2VjcmV0IGlzIHNlY3VyZSwgb3IgaXMgaXQ/MTIzNDU="}]}`
	thing        = `apiVersion: e2e.example.com/v1
kind: Thing
metadata: {name: t}
spec: {text: PLAINTEXT}
`
	things = `apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.e2e.example.com}
spec:
  group: e2e.example.com
  scope: Namespaced
  names: {plural: things, singular: thing, kind: Thing}
  versions:
  - name: v1
    served: true
    storage: true
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}
`
)

// raw returns the value that etcd stores at a key.
func raw(t *testing.T, etcd, key string) []byte {
	t.Helper()
	return rawBy(t, clientv3.Config{Endpoints: []string{etcd}}, key)
}

// rawBy is raw for an etcd that requires a client certificate.
func rawBy(t *testing.T, config clientv3.Config, key string) []byte {
	t.Helper()
	config.DialTimeout = 10 * time.Second
	c, err := clientv3.New(config)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	resp, err := c.Get(t.Context(), key)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("%s: %v, %v", key, resp, err)
	}
	return resp.Kvs[0].Value
}

// TestEncryptionAtRestIsKubeAPIServersBothWays checks, with every provider, that Watershed decrypts objects that
// kube-apiserver encrypted, and the reverse.
func TestEncryptionAtRestIsKubeAPIServersBothWays(t *testing.T) {
	t.Parallel()
	kms := harness.NewKMS(t)
	for name, provider := range map[string]string{
		"aescbc":    `{"aescbc":` + aKey + `}`,
		"aesgcm":    `{"aesgcm":` + aKey + `}`,
		"secretbox": `{"secretbox":` + aKey + `}`,
		"kms:v2":    fmt.Sprintf(`{"kms":{"apiVersion":"v2","name":"k","endpoint":%q,"timeout":"30s"}}`, kms.Endpoint),
	} {
		t.Run(name, func(t *testing.T) {
			dir := harness.TempDir(t)
			etcd := harness.Etcd(t, dir)
			flag, config := encryption(t)
			isEncrypted := func(key string) {
				t.Helper()
				if v := raw(t, etcd, key); !bytes.HasPrefix(v, []byte("k8s:enc:"+name)) ||
					bytes.Contains(v, []byte("PLAINTEXT")) {
					t.Errorf("etcd has %s as %.60q", key, v)
				}
			}
			config(provider, noEncryption)
			theirs := harness.KubeAPIServer(t, dir, etcd, flag)
			theirs.Kubectl("create", "secret", "generic", "theirs", "--from-literal=k=PLAINTEXT")
			theirs.Apply(things)
			harness.Eventually(t, harness.Soon, func() error {
				_, err := theirs.TryKubectl(thing, "apply", "-f", "-")
				return err
			})
			theirs.Stop()
			isEncrypted("/registry/secrets/default/theirs")

			ours := harness.Up(t, "", "--etcd-servers="+etcd, flag)
			const data = "jsonpath={.data.k}"
			contains(t, "their secret", ours.Kubectl("get", "secret", "theirs", "-o", data), "UExBSU5URVhU")
			contains(t, "secrets, from the watch tier", ours.Kubectl("get", "secrets"), "theirs")
			contains(
				t,
				"their custom object",
				ours.Kubectl("get", "thing", "t", "-o", "jsonpath={.spec.text}"),
				"PLAINTEXT",
			)
			ours.Kubectl("create", "secret", "generic", "ours", "--from-literal=k=PLAINTEXT")
			ours.Kubectl("label", "secret", "theirs", "seen=yes")
			ours.Kubectl("label", "thing", "t", "seen=yes")
			contains(
				t,
				"what is written, from the watch tier",
				ours.Kubectl(
					"get",
					"secrets,things",
					"-l",
					"seen=yes",
					"-o",
					"name",
				),
				"secret/theirs\nthing.e2e.example.com/t",
			)
			ours.Stop()
			for _, key := range written {
				isEncrypted(key)
			}

			theirs.Restart()
			contains(t, "our secret", theirs.Kubectl("get", "secret", "ours", "-o", data), "UExBSU5URVhU")
			contains(
				t,
				"our label",
				theirs.Kubectl("get", "secrets,things", "-l", "seen=yes", "-o", "name"),
				"secret/theirs\nthing",
			)
			theirs.Stop()

			// Storage is migrated back to plaintext: every object is rewritten.
			config(noEncryption, provider)
			ours = harness.Up(t, "", "--etcd-servers="+etcd, flag)
			list := ours.Kubectl("get", "secrets,things", "-o", "json")
			if out, err := ours.TryKubectl(list, "replace", "-f", "-"); err != nil {
				t.Fatal(out, err)
			}
			for _, key := range written {
				if v := raw(t, etcd, key); bytes.HasPrefix(v, []byte("k8s:enc:")) {
					t.Errorf("%s is still encrypted", key)
				}
			}
		})
	}
}

// TestAMissingKeyHidesOnlyItsObjects checks that an object whose key is missing is unreadable, and its error names it.
// Other objects are readable, and kube-apiserver behaves the same.
func TestAMissingKeyHidesOnlyItsObjects(t *testing.T) {
	t.Parallel()
	dir := harness.TempDir(t)
	etcd := harness.Etcd(t, dir)
	flag, config := encryption(t)
	config(`{"aesgcm":`+aKey+`}`, noEncryption)
	theirs := harness.KubeAPIServer(t, dir, etcd, flag)
	theirs.Apply(things)
	theirs.Kubectl("create", "namespace", "n")
	apply := func(s *harness.Server, to ...string) {
		harness.Eventually(t, harness.Soon, func() error {
			_, err := s.TryKubectl(thing, append([]string{"apply", "-f", "-"}, to...)...)
			return err
		})
	}
	apply(theirs.Server)
	theirs.Stop()
	config(noEncryption, `{"aesgcm":{"keys":[{"name":"k2","secret":"`+strings.Repeat("A", 43)+`="}]}}`)
	theirs.Restart()
	apply(theirs.Server, "-n", "n")
	ours := theirs.Beside("", flag)
	const lost, good = "/apis/e2e.example.com/v1/namespaces/default/things/t",
		"/apis/e2e.example.com/v1/namespaces/n/things/t"
	for _, path := range []string{lost, good} {
		code, body := theirs.Get(path)
		if gotCode, got := ours.Get(path); gotCode != code || code != http.StatusOK && got != body {
			t.Errorf("%s: %d %.400s\nnot %d %.400s", path, gotCode, got, code, body)
		}
	}
	if code, body := ours.Get(lost); code != http.StatusInternalServerError {
		t.Errorf("%d %s", code, body)
	}
	if code, body := ours.Get("/apis/e2e.example.com/v1/things"); code == http.StatusOK {
		t.Errorf("a list hides undecryptable objects: %s", body)
	}
	if code, _ := ours.Get("/apis/e2e.example.com/v1/namespaces/n/things"); code != http.StatusOK {
		t.Errorf("a list of readable objects: %d", code)
	}
}

// TestAKMSThatIsAwayIsNamed checks that readiness names a KMS that hangs or returns garbage. Other resources and their
// watches go on, and cached data keys still decrypt. Everything works when the KMS returns, with another key.
func TestAKMSThatIsAwayIsNamed(t *testing.T) {
	t.Parallel()
	kms := harness.NewKMS(t)
	flag, config := encryption(t)
	provider := fmt.Sprintf(`{"kms":{"apiVersion":"v2","name":"k","endpoint":%q,"timeout":"3s"}}`, kms.Endpoint)
	config(provider, noEncryption)
	s := harness.Up(t, "", flag)
	s.Kubectl("create", "secret", "generic", "before", "--from-literal=k=v")
	ready := func(want int) {
		t.Helper()
		harness.Eventually(t, 2*time.Minute, func() error { // a healthy KMS v2 plugin is polled once a minute
			code, body := s.Get("/readyz?verbose")
			if code != want || strings.Contains(body, "[-]kms-providers") == (want == http.StatusOK) ||
				!strings.Contains(body, "[+]etcd ok") {
				return fmt.Errorf("%d %s", code, body)
			}
			return nil
		})
	}
	ready(http.StatusOK)
	for _, how := range []string{"hang", "garbage"} {
		kms.Break(how)
		ready(http.StatusInternalServerError)
		contains(t, "a secret from before", s.Kubectl("get", "secret", "before", "-o", "name"), "secret/before")
		revision := s.Kubectl("create", "configmap", how, "-o", "jsonpath={.metadata.resourceVersion}")
		s.Kubectl("label", "configmap", how, "seen=yes")
		harness.Eventually(t, harness.Soon, func() error { // on a busy machine, the event may come too late
			code, body := s.Get("/api/v1/configmaps?watch=1&timeoutSeconds=5&resourceVersion=" + revision)
			if code != http.StatusOK || !strings.Contains(body, `"seen":"yes"`) {
				return fmt.Errorf("a watch of something else: %d %.300s", code, body)
			}
			return nil
		})
	}
	kms.Rotate(t, "key-2")
	kms.Break("")
	ready(http.StatusOK)
	s.Kubectl("create", "secret", "generic", "after", "--from-literal=k=v")
	contains(t, "both keys' secrets", s.Kubectl("get", "secrets", "-o", "name"), "secret/after\nsecret/before")
}

// TestStorageIsMigratedToAnotherKMS checks that a StorageVersionMigration re-encrypts every object after the registries
// switch to another KMS. The former KMS is then no longer needed.
func TestStorageIsMigratedToAnotherKMS(t *testing.T) {
	t.Parallel()
	before, after := harness.NewKMS(t), harness.NewKMS(t)
	flag, config := encryption(t)
	provider := func(name string, k *harness.KMS) string {
		return fmt.Sprintf(`{"kms":{"apiVersion":"v2","name":%q,"endpoint":%q,"timeout":"30s"}}`, name, k.Endpoint)
	}
	config(provider("before", before), noEncryption)
	flags := []string{flag, "--feature-gates=StorageVersionMigrator=true",
		"--runtime-config=storagemigration.k8s.io/v1beta1=true"}
	s := harness.Split(t, "", flags...)
	const secrets = 20
	var all strings.Builder
	name := func(i int) string { return fmt.Sprintf("s-%d", i) }
	for i := range secrets {
		fmt.Fprintf(&all, "---\napiVersion: v1\nkind: Secret\nmetadata: {name: %s}\nstringData: {k: PLAINTEXT}\n",
			name(i))
	}
	s.Apply(all.String())
	etcd := etcdOf(t, s)
	encrypted := func(by string) error {
		for i := range secrets {
			v := rawBy(t, etcd, "/registry/secrets/default/"+name(i))
			if !bytes.HasPrefix(v, []byte("k8s:enc:kms:v2:"+by+":")) || bytes.Contains(v, []byte("PLAINTEXT")) {
				return fmt.Errorf("etcd has %s as %.60q", name(i), v)
			}
		}
		return nil
	}
	if err := encrypted("before"); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	config(provider("after", after), provider("before", before), noEncryption)
	s = harness.Split(t, s.Dir, flags...)
	etcd = etcdOf(t, s)
	s.Managers("--feature-gates=StorageVersionMigrator=true")
	s.Apply("apiVersion: storagemigration.k8s.io/v1beta1\nkind: StorageVersionMigration\nmetadata: {name: m}\n" +
		"spec: {resource: {group: \"\", resource: secrets}}\n")
	s.Kubectl("wait", "--for=condition=Succeeded", "--timeout=2m", "storageversionmigration/m")
	if err := encrypted("after"); err != nil {
		t.Fatal(err)
	}
	s.Stop()
	config(provider("after", after), noEncryption)
	s = harness.Split(t, s.Dir, flags...)
	list := s.Kubectl("get", "secrets", "-o", "jsonpath={.items[*].data.k}")
	if n := strings.Count(list, "UExBSU5URVhU"); n != secrets {
		t.Errorf("%d secrets are read", n)
	}
}

// etcdOf returns the config of a client for split's etcd.
func etcdOf(t *testing.T, s *harness.Server) clientv3.Config {
	t.Helper()
	config, err := harness.RegistryEtcd(s.Dir)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// TestNATSNeverSeesASecret checks that no byte of an encrypted Secret is on NATS' disk or in its memory. Watches still
// deliver the Secret, also watches that resume from the log.
func TestNATSNeverSeesASecret(t *testing.T) {
	t.Parallel()
	flag, config := encryption(t)
	config(`{"aesgcm":`+aKey+`}`, noEncryption)
	s := harness.Split(t, "", flag)
	const plain = "INDEEDASECRET"
	before := s.Kubectl("create", "configmap", "before", "-o", "jsonpath={.metadata.resourceVersion}")
	s.Kubectl("create", "secret", "generic", "s", "--from-literal=k="+plain)
	s.Kubectl("label", "secret", "s", "of="+plain)
	s.Kubectl("create", "configmap", "c", "--from-literal=k=SEENBYNATS")
	harness.Eventually(t, harness.Soon, func() error {
		_, body := s.Get("/api/v1/namespaces/default/secrets?watch=1&timeoutSeconds=1&resourceVersion=" + before)
		if n := strings.Count(body, `"name":"s"`); n != 2 || !strings.Contains(body, plain) {
			return fmt.Errorf("%d events: %.300s", n, body)
		}
		return nil
	})
	contains(t, "a list", s.Kubectl("get", "secrets", "-l", "of="+plain, "-o", "name"), "secret/s")
	memory := memoryOf(t, pid(t, s, "nats-0"))
	if !bytes.Contains(memory, []byte("SEENBYNATS")) {
		t.Error("a config map is not in the memory that was read: it is not NATS'")
	}
	for _, text := range []string{plain, "SU5ERUVEQVNFQ1JFV"} {
		if bytes.Contains(memory, []byte(text)) {
			t.Errorf("NATS has %q in its memory", text)
		}
	}
}

// memoryOf returns a process's writable memory, as a core file would hold it.
func memoryOf(t *testing.T, pid int) (all []byte) {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	mem, err := os.Open(fmt.Sprintf("/proc/%d/mem", pid))
	if err != nil {
		t.Skipf("only root may read another process's memory: %v", err)
	}
	defer mem.Close()
	for line := range strings.Lines(string(maps)) {
		var from, to int64
		var rights string
		if _, err := fmt.Sscanf(line, "%x-%x %s", &from, &to, &rights); err != nil || !strings.HasPrefix(rights, "rw") {
			continue
		}
		piece := make([]byte, to-from)
		n, _ := mem.ReadAt(piece, from)
		all = append(all, piece[:n]...)
	}
	return all
}
