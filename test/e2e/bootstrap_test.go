package e2e

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"strings"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"watershed.dev/test/harness"
)

// TestAKubeletBootstraps checks that a kubelet with a bootstrap token gets a certificate of its node. With it the
// kubelet may act as that node and as no other.
func TestAKubeletBootstraps(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	s.Managers()
	const group = "system:bootstrappers:kubeadm:default-node-token"
	s.Apply(`{apiVersion: v1, kind: Secret, metadata: {name: bootstrap-token-abcdef, namespace: kube-system}, ` +
		`type: bootstrap.kubernetes.io/token, stringData: {token-id: abcdef, token-secret: "0123456789abcdef", ` +
		`usage-bootstrap-authentication: "true", auth-extra-groups: "` + group + `"}}`)
	const requests = "system:certificates.k8s.io:certificatesigningrequests:"
	for name, role := range map[string][2]string{ // as kubeadm binds them
		"kubeadm:kubelet-bootstrap":                     {"system:node-bootstrapper", group},
		"kubeadm:node-autoapprove-bootstrap":            {requests + "nodeclient", group},
		"kubeadm:node-autoapprove-certificate-rotation": {requests + "selfnodeclient", "system:nodes"},
	} {
		s.Kubectl("create", "clusterrolebinding", name, "--clusterrole="+role[0], "--group="+role[1])
	}
	bootstrap := as(t, s, func(c *rest.Config) { c.BearerToken = "abcdef.0123456789abcdef" })
	harness.Eventually(t, harness.Soon, func() error {
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
	_, err := node.CoreV1().Secrets("default").Get(t.Context(), "loose", metav1.GetOptions{})
	if !apierrors.IsForbidden(err) ||
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
	harness.Eventually(t, harness.Soon, func() error {
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
	harness.Eventually(t, harness.Soon, func() error {
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
