package e2e

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/bcrypt"
	clientauthenticationv1 "k8s.io/client-go/pkg/apis/clientauthentication/v1"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/porttest"
	"watershed.dev/test/harness"
)

// loginAs is the environment variable that makes this test binary log in at an issuer, as kubectl's exec credential
// plugin. Its value is the issuer, its CA's file, a user and a client, separated by commas.
const loginAs = "E2E_LOGIN_AS"

func TestMain(m *testing.M) {
	if credentials := os.Getenv(loginAs); credentials != "" {
		if err := login(strings.Split(credentials, ",")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// login prints an ExecCredential (client.authentication.k8s.io/v1).
func login(credentials []string) error {
	ca, err := os.ReadFile(credentials[1])
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	req, err := http.NewRequest(http.MethodPost, credentials[0]+"/token", strings.NewReader(url.Values{
		"grant_type": {"password"}, "username": {credentials[2]}, "password": {"password"},
		"scope": {"openid email groups"},
	}.Encode()))
	if err != nil {
		return err
	}
	req.SetBasicAuth(credentials[3], "secret")
	req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var token struct {
		ID string `json:"id_token"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&token); err != nil {
		return fmt.Errorf("%s: %w", resp.Status, err)
	}
	if token.ID == "" {
		return fmt.Errorf("%s: there is no token in the answer", resp.Status)
	}
	cred := &clientauthenticationv1.ExecCredential{
		Status: &clientauthenticationv1.ExecCredentialStatus{Token: token.ID},
	}
	cred.APIVersion, cred.Kind = clientauthenticationv1.SchemeGroupVersion.String(), "ExecCredential"
	return json.NewEncoder(os.Stdout).Encode(cred)
}

// dex is a running dex server.
type dex struct{ issuer, ca string }

func startDex(t *testing.T) *dex {
	t.Helper()
	dir := harness.TempDir(t)
	authority, err := pki.OpenCA(dir, "ca", "dex-ca")
	if err != nil {
		t.Fatal(err)
	}
	cert, key, _, err := authority.Leaf(pki.Leaf{
		Name: "dex", CommonName: "dex", SANs: []string{"127.0.0.1"}, Usage: pki.Server,
	})
	if err != nil {
		t.Fatal(err)
	}
	hash, err := bcrypt.GenerateFromPassword([]byte("password"), bcrypt.DefaultCost)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprintf("127.0.0.1:%d", porttest.FreePort(t))
	d := &dex{issuer: "https://" + address + "/dex", ca: authority.CertFile()}
	config := writeFile(t, filepath.Join(dir, "dex.yaml"), fmt.Sprintf(`
issuer: %[1]s
storage: {type: memory}
web: {https: %[2]q, tlsCert: %[3]q, tlsKey: %[4]q}
oauth2: {passwordConnector: local, skipApprovalScreen: true, grantTypes: [authorization_code, refresh_token, password]}
enablePasswordDB: true
staticClients:
- {id: kubernetes, name: kubernetes, secret: secret, redirectURIs: ["http://127.0.0.1:8000"]}
- {id: other, name: other, secret: secret, redirectURIs: ["http://127.0.0.1:8001"]}
staticPasswords:
- {email: alice@example.com, hash: %[5]q, username: alice, userID: "1", groups: [dev, ops]}
- {email: bob@example.com, hash: %[5]q, username: bob, userID: "2", emailVerified: false}
`, d.issuer, address, cert, key, hash))
	harness.Start(t, dir, "dex", harness.Peer("dex"), "serve", config)
	harness.Eventually(t, harness.Soon, func() error {
		conn, err := tls.Dial("tcp", address, &tls.Config{InsecureSkipVerify: true})
		if err == nil {
			conn.Close()
		}
		return err
	})
	return d
}

// kubeconfig writes a kubeconfig for a server, with a user that logs in at dex. It returns the path.
func (d *dex) kubeconfig(t *testing.T, s *harness.Server, user, client string) string {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	conf := clientcmdapi.NewConfig()
	conf.Clusters["c"] = &clientcmdapi.Cluster{Server: s.Config().Host, InsecureSkipTLSVerify: true}
	conf.AuthInfos["u"] = &clientcmdapi.AuthInfo{Exec: &clientcmdapi.ExecConfig{
		APIVersion:      clientauthenticationv1.SchemeGroupVersion.String(),
		Command:         self,
		InteractiveMode: clientcmdapi.NeverExecInteractiveMode,
		Env: []clientcmdapi.ExecEnvVar{
			{Name: loginAs, Value: strings.Join([]string{d.issuer, d.ca, user, client}, ",")},
		},
	}}
	conf.Contexts["x"] = &clientcmdapi.Context{Cluster: "c", AuthInfo: "u"}
	conf.CurrentContext = "x"
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*conf, path); err != nil {
		t.Fatal(err)
	}
	return path
}

// kubectl returns kubectl's output, including its errors.
func kubectl(kubeconfig string, args ...string) string {
	out, _ := exec.Command(harness.Peer("kubectl"), append([]string{"--kubeconfig", kubeconfig}, args...)...).
		CombinedOutput()
	return strings.TrimSpace(string(out))
}

// TestDexIsTheIssuer checks that dex's users log in with kubectl's exec credential, and that their permissions follow
// their names and groups. kube-apiserver behaves the same.
func TestDexIsTheIssuer(t *testing.T) {
	t.Parallel()
	d := startDex(t)
	flags := []string{"--oidc-issuer-url=" + d.issuer, "--oidc-client-id=kubernetes", "--oidc-ca-file=" + d.ca,
		"--oidc-username-claim=email", "--oidc-groups-claim=groups"}
	said := map[string][]string{}
	for name, s := range map[string]*harness.Server{
		"watershed":      harness.Up(t, "", flags...),
		"kube-apiserver": harness.Oracle(t, flags...),
	} {
		alice := d.kubeconfig(t, s, "alice@example.com", "kubernetes")
		harness.Eventually(t, harness.Soon, func() error { // until the server has read the issuer's keys
			if out := kubectl(alice, "auth", "whoami"); !strings.Contains(out, "alice@example.com") {
				return fmt.Errorf("%s: %s", name, out)
			}
			return nil
		})
		say := func(out string) { said[name] = append(said[name], out) }
		say(kubectl(alice, "auth", "whoami", "-o", "jsonpath={.status.userInfo.username} {.status.userInfo.groups}"))
		say(kubectl(alice, "get", "namespaces"))
		s.Kubectl("create", "clusterrole", "reads-namespaces", "--verb=get,list", "--resource=namespaces")
		s.Kubectl(
			"create",
			"clusterrolebinding",
			"ops-read-namespaces",
			"--clusterrole=reads-namespaces",
			"--group=ops",
		)
		harness.Eventually(t, harness.Soon, func() error {
			if out := kubectl(alice, "get", "namespaces", "kube-system", "-o", "name"); out != "namespace/kube-system" {
				return fmt.Errorf("%s: %s", name, out)
			}
			return nil
		})
		say(kubectl(d.kubeconfig(t, s, "bob@example.com", "kubernetes"), "get", "namespaces"))
		say(kubectl(d.kubeconfig(t, s, "alice@example.com", "other"), "get", "namespaces"))
	}
	for i, want := range []string{`alice@example.com ["dev","ops","system:authenticated"]`,
		`User "alice@example.com" cannot list resource "namespaces"`, "Unauthorized", "Unauthorized"} {
		ours, theirs := said["watershed"][i], said["kube-apiserver"][i]
		if ours != theirs || !strings.Contains(ours, want) {
			t.Errorf("want %s\nwatershed:      %s\nkube-apiserver: %s", want, ours, theirs)
		}
	}
}

// TestKubeadmSetsUp checks kubeadm's phases that need no node, and that a joining node finds the objects that kubeadm
// uploads.
func TestKubeadmSetsUp(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	dir := harness.TempDir(t)
	certificates := filepath.Join(dir, "pki")
	if err := os.MkdirAll(certificates, 0o700); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"ca.crt", "ca.key", "front-proxy-ca.crt", "front-proxy-ca.key", "sa.key", "sa.pub"} {
		data, err := os.ReadFile(filepath.Join(s.Dir, "pki", f))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(certificates, f), data, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	config := writeFile(t, filepath.Join(dir, "kubeadm.yaml"), fmt.Sprintf(`
apiVersion: kubeadm.k8s.io/v1beta4
kind: InitConfiguration
bootstrapTokens: [{token: abcdef.0123456789abcdef}]
localAPIEndpoint: {advertiseAddress: 192.0.2.1, bindPort: %[1]d}
nodeRegistration: {name: cp-1, criSocket: "unix:///nowhere.sock"}
certificateKey: "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
---
apiVersion: kubeadm.k8s.io/v1beta4
kind: ClusterConfiguration
kubernetesVersion: v1.36.3
controlPlaneEndpoint: 127.0.0.1:%[1]d
certificatesDir: %[2]s
encryptionAlgorithm: ECDSA-P256
networking: {serviceSubnet: 10.96.0.0/16, podSubnet: 10.244.0.0/16}
`, s.Port, certificates))
	kubeadm := func(args ...string) string {
		t.Helper()
		var out bytes.Buffer
		cmd := exec.Command(harness.Peer("kubeadm"), args...)
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Run(); err != nil {
			t.Fatalf("kubeadm %s: %v\n%s", strings.Join(args, " "), err, out.String())
		}
		return out.String()
	}
	kubeadm("init", "phase", "certs", "all", "--config", config)
	kubeadm("init", "phase", "kubeconfig", "all", "--config", config, "--kubeconfig-dir", dir)
	admin := filepath.Join(dir, "super-admin.conf")
	for file, username := range map[string]string{
		"super-admin.conf":        "kubernetes-super-admin",
		"admin.conf":              "kubernetes-admin",
		"scheduler.conf":          "system:kube-scheduler",
		"controller-manager.conf": "system:kube-controller-manager",
	} {
		conf, err := clientcmd.LoadFromFile(filepath.Join(dir, file))
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range conf.Clusters { // some of them name the advertised address, which has no listener
			c.Server = s.Config().Host
		}
		if err := clientcmd.WriteToFile(*conf, filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
		if out := kubectl(filepath.Join(dir, file), "auth", "whoami", "-o",
			"jsonpath={.status.userInfo.username}"); out != username {
			t.Errorf("%s is of %s", file, out)
		}
	}
	for _, phase := range [][]string{{"upload-config", "all"}, {"upload-certs", "--upload-certs"}, {"bootstrap-token"},
		{"bootstrap-token"}, {"addon", "all"}} {
		kubeadm(append(append([]string{"init", "phase"}, phase...), "--config", config, "--kubeconfig", admin)...)
	}
	for _, object := range []string{"configmap/kubeadm-config", "configmap/kubelet-config", "secret/kubeadm-certs",
		"secret/bootstrap-token-abcdef", "deployment/coredns", "daemonset/kube-proxy"} {
		if out := kubectl(admin, "-n", "kube-system", "get", object, "-o", "name"); !strings.Contains(
			out,
			strings.Split(object, "/")[1],
		) {
			t.Errorf("%s: %s", object, out)
		}
	}
	if out := kubectl(admin, "get", "--raw", "/api/v1/namespaces/kube-public/configmaps/cluster-info",
		"--as=system:anonymous", "--as-group=system:unauthenticated"); !strings.Contains(
		out,
		"certificate-authority-data",
	) {
		t.Errorf("cluster-info: %s", out)
	}
	kubeadm("token", "create", "123456.0123456789abcdef", "--kubeconfig", admin)
	if out := kubeadm("token", "list", "--kubeconfig", admin); !strings.Contains(out, "123456.0123456789abcdef") {
		t.Errorf("tokens: %s", out)
	}
	kubeadm("token", "delete", "123456", "--kubeconfig", admin)
}
