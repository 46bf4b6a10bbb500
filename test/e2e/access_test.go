package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/crypto/bcrypt"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	signer "k8s.io/kubernetes/pkg/serviceaccount/externaljwt/plugin/testing/v1"

	"watershed.dev/platform/pki"
	"watershed.dev/platform/porttest"
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
	t.Parallel()
	dir := t.TempDir()
	tokens := writeFile(t, filepath.Join(dir, "tokens.csv"), "first,alice,1\n")
	passwords := writeFile(t, filepath.Join(dir, "passwords.csv"), "hush,bob,2,\"readers\"\n")
	debug := fmt.Sprintf("127.0.0.1:%d", porttest.FreePort(t))
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
		harness.Eventually(t, harness.BeforeRefresh, func() error {
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
	harness.Eventually(t, harness.BeforeRefresh, func() error {
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
	replaced, err := pki.OpenCA(dir, "front-proxy", "front-proxy")
	if err != nil {
		t.Fatal(err)
	}
	added, err := os.ReadFile(replaced.CertFile())
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(s.Dir, "pki", "front-proxy-ca.crt"), string(added))
	// kube-apiserver publishes it at once, and keeps the old CA
	harness.Eventually(t, harness.BeforeRefresh, func() error {
		published := s.Kubectl("get", "configmap", "-n", "kube-system", "extension-apiserver-authentication",
			"-o", "jsonpath={.data.requestheader-client-ca-file}")
		if n := strings.Count(published, "BEGIN CERTIFICATE"); n != 2 || !strings.Contains(published, string(added)) {
			return fmt.Errorf("%d front proxies' CAs are published", n)
		}
		return nil
	})
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
	t.Parallel()
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

func bcrypted(t testing.TB, password string) string {
	t.Helper()
	h, err := bcrypt.GenerateFromPassword([]byte(password), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	return string(h)
}
