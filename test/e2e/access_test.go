package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/bcrypt"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	signer "k8s.io/kubernetes/pkg/serviceaccount/externaljwt/plugin/testing/v1"

	"watershed.dev/platform/reload/reloadtest"
	"watershed.dev/test/harness"
)

// as returns a client of a server with only the credentials that change sets.
func as(t testing.TB, s *harness.Server, change func(*rest.Config)) *kubernetes.Clientset {
	t.Helper()
	c := rest.AnonymousClientConfig(s.Config())
	c.Insecure, c.CAData, c.CAFile, c.QPS = true, nil, "", -1
	c.Dial = s.Dialer()
	change(c)
	return kubernetes.NewForConfigOrDie(c)
}

// whoami returns the name of the user that the server authenticates the client as.
func whoami(t testing.TB, c *kubernetes.Clientset) (string, error) {
	t.Helper()
	raw, err := c.AuthenticationV1().RESTClient().Post().Resource("selfsubjectreviews").
		Body([]byte(`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`)).DoRaw(t.Context())
	var r struct {
		Status struct {
			UserInfo struct{ Username string }
		}
	}
	if err == nil {
		err = json.Unmarshal(raw, &r)
	}
	return r.Status.UserInfo.Username, err
}

func writeFile(t testing.TB, path, text string) string {
	t.Helper()
	reloadtest.Replace(t, path, text)
	return path
}

// TestCredentialFilesAreReloaded checks that a changed credential file takes effect soon after it is written. A
// malformed file is logged and counted, and the credentials that were read before stay in force.
func TestCredentialFilesAreReloaded(t *testing.T) {
	dir := t.TempDir()
	tokens := writeFile(t, filepath.Join(dir, "tokens.csv"), "first,alice,1\n")
	passwords := writeFile(t, filepath.Join(dir, "passwords.csv"), "hush,bob,2,\"readers\"\n")
	debug := fmt.Sprintf("127.0.0.1:%d", harness.FreePort(t))
	s := harness.Up(t, "", "--token-auth-file="+tokens, "--basic-auth-file="+passwords, "--debug-address="+debug,
		"--authentication-cache-ttl=1s", "--anonymous-auth=false")
	token := func(text string) *kubernetes.Clientset {
		return as(t, s, func(c *rest.Config) { c.BearerToken = text })
	}
	password := func(name, text string) *kubernetes.Clientset {
		return as(t, s, func(c *rest.Config) { c.Username, c.Password = name, text })
	}
	is := func(c *kubernetes.Clientset, want string) {
		t.Helper()
		harness.Eventually(t, 20*time.Second, func() error {
			got, err := whoami(t, c)
			if want == "" && apierrors.IsUnauthorized(err) {
				return nil
			}
			if err == nil && got != want {
				err = fmt.Errorf("authenticated as %q, not %q", got, want)
			}
			return err
		})
	}
	is(token("first"), "alice")
	is(password("bob", "hush"), "bob")
	is(password("bob", "Hush"), "")
	writeFile(t, tokens, "second,alice,1\n")
	writeFile(t, passwords, bcrypted(t, "quiet")+",bob,2\n")
	is(token("second"), "alice")
	is(token("first"), "")
	is(password("bob", "quiet"), "bob")
	is(password("bob", "hush"), "")
	writeFile(t, tokens, "a line without columns\n")
	page := func(path string) string {
		resp, err := http.Get("http://" + debug + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, _ := io.ReadAll(resp.Body)
		return string(text)
	}
	harness.Eventually(t, 20*time.Second, func() error {
		if text := page("/files"); !strings.Contains(text, "[-]token-auth-file "+tokens+" refused: ") ||
			!strings.Contains(text, "[+]basic-auth-file") {
			return fmt.Errorf("/files says %s", text)
		}
		return nil
	})
	is(token("second"), "alice")
	if text := page("/metrics"); !strings.Contains(
		text,
		`watershed_file_refused{file="`+tokens+`",flag="token-auth-file"} 1`,
	) ||
		!strings.Contains(text, `watershed_authn_attempts_total{authenticator="basic",result="error"}`) ||
		!strings.Contains(text, `watershed_authn_deprecated{authenticator="basic"} 1`) {
		t.Error("the metrics do not count the failure")
	}
	if log := s.Log(); !strings.Contains(log, "A file was not reloaded") ||
		!strings.Contains(log, "--basic-auth-file is on") {
		t.Errorf("the log does not contain the failure")
	}
	conf := s.Config()
	client, err := rest.HTTPClientFor(
		&rest.Config{Host: conf.Host, TLSClientConfig: rest.TLSClientConfig{Insecure: true}},
	)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Get(conf.Host + "/api")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusUnauthorized ||
		resp.Header.Get("Www-Authenticate") != `Basic realm="kubernetes-master"` {
		t.Errorf("a browser gets no password prompt: %s %v", resp.Status, resp.Header)
	}
}

// TestAnExternalSignerSigns checks that tokens of an external signer (KEP-740) are issued and accepted, and that the
// signer's keys are published, as kube-apiserver does it.
func TestAnExternalSignerSigns(t *testing.T) {
	socket := filepath.Join(harness.TempDir(t), "signer.sock")
	mock := signer.NewMockSigner(t, socket)
	flags := []string{"--service-account-signing-endpoint=" + socket}
	var keys []map[string]bool
	for name, s := range map[string]*harness.Server{
		"watershed": harness.Up(t, "", flags...),
		"split":     harness.Split(t, "", flags...),
		"kube-apiserver": harness.Oracle(t, append(flags, "--service-account-key-file=",
			"--service-account-signing-key-file=")...),
	} {
		s.Kubectl("create", "serviceaccount", "robot")
		said := strings.Fields(s.Kubectl("create", "token", "robot")) // a warning: it expires sooner than requested
		token := said[len(said)-1]
		if username, err := whoami(t, as(t, s, func(c *rest.Config) { c.BearerToken = token })); err != nil ||
			username != "system:serviceaccount:default:robot" {
			t.Errorf("%s: %q, %v", name, username, err)
		}
		code, document := s.Get("/openid/v1/jwks")
		if code != http.StatusOK {
			t.Errorf("%s: no keys: %d %s", name, code, document)
		}
		var set struct{ Keys []json.RawMessage }
		if err := json.Unmarshal([]byte(document), &set); err != nil || len(set.Keys) != len(mock.GetSupportedKeys()) {
			t.Errorf("%s: keys %s: %v", name, document, err)
		}
		keyIDs := map[string]bool{} // the signer returns them in random order
		for _, k := range set.Keys {
			keyIDs[string(k)] = true
		}
		keys = append(keys, keyIDs)
	}
	for _, k := range keys {
		if !maps.Equal(k, keys[0]) {
			t.Errorf("the keys differ: %v, %v", k, keys[0])
		}
	}
}

// TestAQuotaHoldsWithTwoReplicas checks that concurrent creates do not exceed a quota with two admission replicas.
func TestAQuotaHoldsWithTwoReplicas(t *testing.T) {
	s := harness.Split(t, "")
	s.Scale("admission=2")
	const most, tries = 40, 100
	quotas := s.Client().CoreV1().ResourceQuotas("default")
	hard := corev1.ResourceList{"count/configmaps": resource.MustParse(fmt.Sprint(most))}
	q, err := quotas.Create(t.Context(), &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "q"},
		Spec:       corev1.ResourceQuotaSpec{Hard: hard},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// kube-controller-manager would set this status
	q.Status = corev1.ResourceQuotaStatus{
		Hard: hard,
		Used: corev1.ResourceList{"count/configmaps": resource.MustParse("0")},
	}
	if _, err := quotas.UpdateStatus(t.Context(), q, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	create := func(namespace, name string, dry ...string) error {
		_, err := s.Client().CoreV1().ConfigMaps(namespace).Create(t.Context(), &corev1.ConfigMap{
			ObjectMeta: metav1.ObjectMeta{Name: name},
		}, metav1.CreateOptions{DryRun: dry})
		return err
	}
	// A replica that has not read a quota admits every object, as kube-apiserver does. A second quota, of zero objects
	// in another namespace, is younger than the first. A replica that enforces it has therefore read both.
	s.Kubectl("create", "namespace", "full")
	s.Apply(
		`{apiVersion: v1, kind: ResourceQuota, metadata: {name: q, namespace: full}, spec: {hard: {count/configmaps: "0"}}}`,
	)
	s.Kubectl("-n", "full", "patch", "quota", "q", "--subresource=status", "--type=merge", "-p",
		`{"status":{"hard":{"count/configmaps":"0"},"used":{"count/configmaps":"0"}}}`)
	refusals := 0
	harness.Eventually(t, 20*time.Second, func() error {
		if refusals++; create("full", "none", metav1.DryRunAll) == nil {
			refusals = 0
		}
		if refusals < 20 { // each replica has answered some of them
			return errors.New("a replica has not read the quotas")
		}
		return nil
	})
	var made, refused atomic.Int32
	var wg sync.WaitGroup
	for n := range tries {
		wg.Go(func() {
			err := create("default", fmt.Sprintf("c-%d", n))
			for apierrors.IsConflict(err) { // the quota changed too often meanwhile, as with several kube-apiservers
				err = create("default", fmt.Sprintf("c-%d", n))
			}
			switch {
			case err == nil:
				made.Add(1)
			case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"):
				refused.Add(1)
			default:
				t.Errorf("%v", err)
			}
		})
	}
	wg.Wait()
	q, err = quotas.Get(t.Context(), "q", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	all, err := s.Client().CoreV1().ConfigMaps("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	used := q.Status.Used["count/configmaps"]
	if made.Load() != most || refused.Load() != tries-most || len(all.Items) != most || used.Value() != most {
		t.Errorf(
			"%d made, %d refused, %d there, %s used of %d",
			made.Load(),
			refused.Load(),
			len(all.Items),
			used.String(),
			most,
		)
	}
}

// TestAKubeletBootstraps checks that a kubelet with a bootstrap token gets a certificate of its node. With it the
// kubelet may act as that node and as no other.
func TestAKubeletBootstraps(t *testing.T) {
	s := harness.Up(t, "")
	s.Managers()
	s.Apply(
		`{apiVersion: v1, kind: Secret, metadata: {name: bootstrap-token-abcdef, namespace: kube-system}, type: bootstrap.kubernetes.io/token, stringData: {token-id: abcdef, token-secret: "0123456789abcdef", usage-bootstrap-authentication: "true", auth-extra-groups: "system:bootstrappers:kubeadm:default-node-token"}}`,
	)
	for name, role := range map[string][2]string{ // as kubeadm binds them
		"kubeadm:kubelet-bootstrap":                     {"system:node-bootstrapper", "system:bootstrappers:kubeadm:default-node-token"},
		"kubeadm:node-autoapprove-bootstrap":            {"system:certificates.k8s.io:certificatesigningrequests:nodeclient", "system:bootstrappers:kubeadm:default-node-token"},
		"kubeadm:node-autoapprove-certificate-rotation": {"system:certificates.k8s.io:certificatesigningrequests:selfnodeclient", "system:nodes"},
	} {
		s.Kubectl("create", "clusterrolebinding", name, "--clusterrole="+role[0], "--group="+role[1])
	}
	bootstrap := as(t, s, func(c *rest.Config) { c.BearerToken = "abcdef.0123456789abcdef" })
	harness.Eventually(t, 20*time.Second, func() error {
		username, err := whoami(t, bootstrap)
		if err == nil && username != "system:bootstrap:abcdef" {
			err = fmt.Errorf("authenticated as %s", username)
		}
		return err
	})
	mine := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "mine"}}
	if _, err := bootstrap.CoreV1().Nodes().Create(t.Context(), mine,
		metav1.CreateOptions{}); !apierrors.IsForbidden(
		err,
	) {
		t.Errorf("a bootstrap token makes a node: %v", err)
	}
	cert, key := signedFor(t, bootstrap, "mine")
	node := as(t, s, func(c *rest.Config) { c.TLSClientConfig.CertData, c.TLSClientConfig.KeyData = cert, key })
	if username, err := whoami(t, node); err != nil || username != "system:node:mine" {
		t.Fatalf("%s, %v", username, err)
	}
	for kind, tried := range map[string]func(string) error{
		"a node": func(name string) error {
			_, err := node.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}},
				metav1.CreateOptions{})
			return err
		},
		"a lease": func(name string) error {
			_, err := node.CoordinationV1().Leases("kube-node-lease").Create(t.Context(),
				&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
			return err
		},
	} {
		if err := tried("mine"); err != nil {
			t.Errorf("its own %s: %v", kind, err)
		}
		if err := tried("theirs"); !apierrors.IsForbidden(err) {
			t.Errorf("another's %s: %v", kind, err)
		}
	}
	s.Kubectl("create", "secret", "generic", "loose")
	if _, err := node.CoreV1().Secrets("default").Get(t.Context(), "loose", metav1.GetOptions{}); !apierrors.IsForbidden(
		err,
	) ||
		!strings.Contains(err.Error(), "no relationship found between node 'mine' and this object") {
		t.Errorf("a secret that no pod of the node's has: %v", err)
	}
	// a node that RBAC grants more is still limited to its own objects
	if _, err := s.Client().RbacV1().ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "nodes-are-admins"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "system:nodes"}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	s.Apply(`{apiVersion: coordination.k8s.io/v1, kind: Lease, metadata: {name: theirs, namespace: kube-node-lease}}`)
	harness.Eventually(t, 10*time.Second, func() error {
		_, err := node.CoreV1().Secrets("default").Get(t.Context(), "loose", metav1.GetOptions{})
		return err
	})
	lease, err := node.CoordinationV1().Leases("kube-node-lease").Get(t.Context(), "theirs", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := node.CoordinationV1().Leases("kube-node-lease").Update(t.Context(), lease,
		metav1.UpdateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(),
		"can only access node lease with the same name as the requesting node") {
		t.Errorf("it updates another node's lease: %v", err)
	}
	if err := node.CoordinationV1().Leases("kube-node-lease").Delete(t.Context(), "theirs",
		metav1.DeleteOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("it deletes another node's lease: %v", err)
	}
	own, err := node.CoordinationV1().Leases("kube-node-lease").Get(t.Context(), "mine", metav1.GetOptions{})
	if err == nil {
		_, err = node.CoordinationV1().Leases("kube-node-lease").Update(t.Context(), own, metav1.UpdateOptions{})
	}
	if err != nil {
		t.Errorf("its own lease: %v", err)
	}
}

// signedFor requests a kubelet's client certificate, and waits until the controllers have approved and signed it.
func signedFor(t *testing.T, c *kubernetes.Clientset, node string) (cert, key []byte) {
	t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
	}, private)
	if err != nil {
		t.Fatal(err)
	}
	csrs := c.CertificatesV1().CertificateSigningRequests()
	csr, err := csrs.Create(t.Context(), &certificatesv1.CertificateSigningRequest{
		ObjectMeta: metav1.ObjectMeta{GenerateName: "node-csr-"},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: certificatesv1.KubeAPIServerClientKubeletSignerName,
			Usages:     []certificatesv1.KeyUsage{certificatesv1.UsageDigitalSignature, certificatesv1.UsageClientAuth},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, 30*time.Second, func() error {
		if csr, err = csrs.Get(t.Context(), csr.Name, metav1.GetOptions{}); err == nil &&
			len(csr.Status.Certificate) == 0 {
			err = fmt.Errorf("it is not signed: %v", csr.Status.Conditions)
		}
		return err
	})
	private8, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	return csr.Status.Certificate, bytes.TrimSpace(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private8}))
}

func bcrypted(t testing.TB, password string) string {
	t.Helper()
	h, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	return string(h)
}
