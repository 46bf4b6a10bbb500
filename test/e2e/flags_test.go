package e2e_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	"k8s.io/client-go/rest"
	_ "k8s.io/component-base/logs/json/register" // the flags of the JSON format
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"watershed.dev/platform/deflate"
	"watershed.dev/test/harness"
)

// upstreamFlags returns kube-apiserver's own flags, also the hidden flags, each as --name=default. Upstream's FlagSet
// lacks --help and --version, which end the program.
func upstreamFlags(t *testing.T) (args []string) {
	t.Helper()
	for _, fs := range options.NewServerRunOptions().Flags().FlagSets {
		fs.VisitAll(func(f *pflag.Flag) {
			standard := f.DefValue
			if s, ok := f.Value.(pflag.SliceValue); ok {
				standard = strings.Join(s.GetSlice(), ",")
			}
			if standard == "[]" || standard == "<nil>" {
				standard = ""
			}
			if f.Value.Set(standard) != nil { // a default that no command line can have
				standard = map[string]string{
					"allow-metric-labels":   "apiserver_request_total,verb=GET",
					"oidc-required-claim":   "a=b",
					"tls-curve-preferences": "29",
					"tls-sni-cert-key":      "a.crt,a.key",
				}[f.Name]
			}
			if arg := "--" + f.Name + "=" + standard; !slices.Contains(args, arg) {
				args = append(args, arg)
			}
		})
	}
	if len(args) != 175 {
		t.Fatalf("kube-apiserver has %d flags", len(args))
	}
	return args
}

// TestUpAcceptsEveryFlagOfKubeAPIServer checks that up and split accept each flag of kube-apiserver with its default.
// --help ends the program after the flags before it have been parsed.
func TestUpAcceptsEveryFlagOfKubeAPIServer(t *testing.T) {
	args := upstreamFlags(t)
	forSplit := slices.DeleteFunc(slices.Clone(args), func(arg string) bool {
		return slices.ContainsFunc(splitSets, func(name string) bool { return strings.HasPrefix(arg, "--"+name+"=") })
	})
	for command, args := range map[string][]string{"up": args, "split": forSplit, "kube-apiserver": args} {
		args = slices.Concat([]string{command}, args, []string{"--help"})
		out, err := exec.Command(harness.Watershed(), args...).CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v: %s", command, err, harness.LastLine(out))
		}
	}
}

// splitSets are the flags that split sets for its processes.
var splitSets = []string{"etcd-servers", "etcd-cafile", "etcd-certfile", "etcd-keyfile", "permit-port-sharing"}

// TestMigrateAcceptsEveryFlagOfKubeAPIServer checks that a manifest with each flag of kube-apiserver at its default is
// migrated whole, and that flags that cannot be migrated are named.
func TestMigrateAcceptsEveryFlagOfKubeAPIServer(t *testing.T) {
	migrate := func(args ...string) (string, error) {
		manifest, err := json.Marshal(map[string]any{"spec": map[string]any{
			"containers": []any{map[string]any{"command": append([]string{"kube-apiserver"}, args...)}},
		}})
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "kube-apiserver.yaml")
		if err := os.WriteFile(path, manifest, 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(harness.Watershed(), "migrate", "--from", path).CombinedOutput()
		return string(out), err
	}
	out, err := migrate(upstreamFlags(t)...)
	if err != nil || strings.Contains(out, "omitted") {
		t.Errorf("%v: %s", err, out)
	}
	out, err = migrate("--no-such-flag=1")
	if err == nil || !strings.Contains(out, "--no-such-flag") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestKubeAPIServerByName checks that a link to Watershed called kube-apiserver runs with kube-apiserver's defaults,
// and keeps its state in --cert-dir.
func TestKubeAPIServerByName(t *testing.T) {
	t.Parallel()
	defaults := []string{"--authorization-mode=", "--enable-admission-plugins=", "--service-cluster-ip-range=",
		"--allow-privileged=", "--advertise-address=", "--tls-cert-file=", "--tls-private-key-file=",
		"--disable-admission-plugins=ServiceAccount"}
	theirs, link := harness.Oracle(t, defaults...), harness.Link(t, defaults...)
	anonymous := func(s *harness.Server) int {
		c := &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}}
		resp, err := c.Get(fmt.Sprintf("https://127.0.0.1:%d/api", s.Port))
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		return resp.StatusCode
	}
	names := func(s *harness.Server) []string {
		b, err := os.ReadFile(filepath.Join(s.Dir, "certs", "apiserver.crt"))
		if err != nil {
			t.Fatal(err)
		}
		block, _ := pem.Decode(b)
		cert, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			t.Fatal(err)
		}
		return append(cert.DNSNames, fmt.Sprint(cert.IPAddresses))
	}
	for _, get := range []func(*harness.Server) any{
		func(s *harness.Server) any { return anonymous(s) },
		func(s *harness.Server) any { return names(s) },
		func(s *harness.Server) any {
			return s.Kubectl("get", "service", "kubernetes", "-o", "jsonpath={.spec.clusterIPs}{.spec.type}")
		},
		func(s *harness.Server) any { _, err := s.TryKubectl("", "auth", "can-i", "*", "*"); return err == nil },
		func(s *harness.Server) any {
			_, err := s.TryKubectl("", "run", "p", "--image=i", "--privileged", "--restart=Never", "-o", "name")
			return err == nil
		},
	} {
		if want, got := get(theirs), get(link.Server); !reflect.DeepEqual(want, got) {
			t.Errorf("%v, and kube-apiserver has %v", got, want)
		}
	}
	comparePages(t, theirs, link.Server)
	link.Kubectl("create", "configmap", "kept")
	before := names(link.Server)
	link.Stop()
	link.Restart()
	link.Kubectl("get", "configmap", "kept")
	if got := names(link.Server); !slices.Equal(got, before) {
		t.Errorf("certificates for %q and %q", before, got)
	}

	run := func(args ...string) (string, int) {
		cmd := exec.Command(link.Program, args...)
		out, err := cmd.CombinedOutput()
		if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		return string(out), cmd.ProcessState.ExitCode()
	}
	for want, args := range map[string][]string{
		"Kubernetes v1.36.3\n":                      {"--version"},
		"--etcd-servers must be specified":          {"--cert-dir=" + t.TempDir()},
		"service-account-issuer is a required flag": {"--etcd-servers=http://127.0.0.1:1"},
		`unknown argument "up"`:                     {"up"},
		`must match major/minor/patch`:              {"--version=v1.35.0-custom"},
	} {
		if out, code := run(args...); !strings.Contains(out, want) || (code == 0) != (args[0] == "--version") {
			t.Errorf("%q: %d %s", args, code, out)
		}
	}
	if out, code := run("--help"); code != 0 || strings.Contains(out, "--insecure-port") {
		t.Errorf("--help: %d %s", code, out)
	}
}

// ownFlagValues are the flags whose values differ in /flagz: paths and ports of the test, and values that
// kube-apiserver or Watershed complete after the start.
var ownFlagValues = []string{"advertise-address", "api-audiences", "cert-dir", "etcd-servers", "external-hostname",
	"help", "secure-port", "service-account-key-file", "service-account-signing-key-file", "service-cluster-ip-range",
	"tls-cert-file", "tls-private-key-file", "watch-cache-sizes", "client-ca-file", "kubelet-client-certificate",
	"kubelet-client-key", "requestheader-client-ca-file", "proxy-client-cert-file", "proxy-client-key-file"}

// comparePages compares the pages of the servers about themselves: flags, paths, checks, status and verbosity.
func comparePages(t *testing.T, theirs, ours *harness.Server) {
	t.Helper()
	page := func(s *harness.Server, method, path, accept, body string) (int, string) {
		client, err := rest.HTTPClientFor(s.Config())
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequest(method, s.Config().Host+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept", accept)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	const flagz, statusz = "application/json;as=Flagz;v=v1beta1;g=config.k8s.io",
		"application/json;as=Statusz;v=v1beta1;g=config.k8s.io"
	type object struct {
		Kind, APIVersion, BinaryVersion, EmulationVersion string
		Flags                                             map[string]string
		Paths                                             []string
	}
	get := func(s *harness.Server, path, accept string) (o object) {
		code, body := page(s, "GET", path, accept, "")
		if err := json.Unmarshal([]byte(body), &o); err != nil || code != http.StatusOK {
			t.Errorf("%s: %d %v: %s", path, code, err, body)
		}
		return o
	}
	want, got := get(theirs, "/flagz", flagz), get(ours, "/flagz", flagz)
	for name, value := range want.Flags {
		if own, ok := got.Flags[name]; own != value && !slices.Contains(ownFlagValues, name) {
			t.Errorf("/flagz: --%s is %q (%v), and kube-apiserver has %q", name, own, ok, value)
		}
	}
	if len(want.Flags) < 177-2 { // the flags of the JSON format depend on the build
		t.Errorf("kube-apiserver has %d flags", len(want.Flags))
	}
	want, got = get(theirs, "/statusz", statusz), get(ours, "/statusz", statusz)
	if !reflect.DeepEqual(want, got) {
		t.Errorf("/statusz: %+v, and kube-apiserver has %+v", got, want)
	}
	for _, path := range []string{"/", "/index.html"} {
		want, got := get(theirs, path, "application/json").Paths, get(ours, path, "application/json").Paths
		own := slices.DeleteFunc(got, func(p string) bool {
			// Watershed creates the roles also without RBAC (docs/operators/compatibility.md)
			return slices.Contains(want, p) || strings.HasSuffix(p, "/poststarthook/rbac/bootstrap-roles")
		})
		missing := slices.DeleteFunc(want, func(p string) bool {
			return slices.Contains(get(ours, path, "application/json").Paths, p)
		})
		if len(missing) > 0 || strings.Join(own, " ") != ownPaths {
			t.Errorf("%s lacks %q, and has %q in addition", path, missing, own)
		}
	}
	for _, c := range []struct{ method, path, accept, body string }{
		{"GET", "/flagz", "application/xml", ""},
		{"GET", "/statusz", "application/json", ""},
		{"GET", "/debug/flags", "", ""},
		{"GET", "/debug/flags/v", "", ""},
		{"PUT", "/debug/flags/v", "", "x"},
		{"PUT", "/debug/flags/v", "", "3"},
		{"PUT", "/debug/flags/v", "", "0"},
		{"POST", "/index.html", "", ""},
	} {
		wantCode, want := page(theirs, c.method, c.path, c.accept, c.body)
		gotCode, got := page(ours, c.method, c.path, c.accept, c.body)
		if c.path == "/index.html" {
			want, got = "", ""
		}
		if gotCode != wantCode || got != want {
			t.Errorf("%s %s %q: %d %s, and kube-apiserver responds %d %s", c.method, c.path, c.body, gotCode, got,
				wantCode, want)
		}
	}
}

// ownPaths are the paths of Watershed's own health checks.
const ownPaths = "/healthz/admission /healthz/authn /healthz/authz /healthz/discovery /healthz/fairness " +
	"/healthz/kms-providers /readyz/admission /readyz/authn /readyz/authz /readyz/discovery /readyz/fairness " +
	"/readyz/kms-providers /readyz/watch-tier"

// TestDisabledGates checks that gates that Watershed implements itself have kube-apiserver's effect when they are off.
func TestDisabledGates(t *testing.T) {
	t.Parallel()
	const gates = "--feature-gates=WatchList=false,APIResponseCompression=false,StorageVersionHash=false," +
		"UnknownVersionInteroperabilityProxy=false,APIServerIdentity=false,ComponentFlagz=false," +
		"ComponentStatusz=false,WatchCacheInitializationPostStartHook=false"
	theirs, link := harness.Oracle(t, gates), harness.Link(t, gates)
	raw := func(s *harness.Server, path string) string {
		out, err := s.TryKubectl("", "get", "--raw", path)
		if err != nil {
			return err.Error()
		}
		return out
	}
	hooks := regexp.MustCompile(`(?m)^\[.\](\S*(?:poststarthook|autoregister)\S*)`)
	for name, get := range map[string]func(*harness.Server) any{
		"a watch with initial events": func(s *harness.Server) any {
			return raw(s, "/api/v1/namespaces?watch=1&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&"+
				"allowWatchBookmarks=true&timeoutSeconds=1")
		},
		"/flagz":   func(s *harness.Server) any { return raw(s, "/flagz") },
		"/statusz": func(s *harness.Server) any { return raw(s, "/statusz") },
		"storage version hashes": func(s *harness.Server) any {
			return strings.Contains(raw(s, "/apis/apps/v1"), "storageVersionHash")
		},
		"identity leases": func(s *harness.Server) any {
			return s.Kubectl("get", "leases", "-n", "kube-system", "-l", "apiserver.kubernetes.io/identity",
				"-o", "name", "--ignore-not-found")
		},
		"checks": func(s *harness.Server) any {
			found := hooks.FindAllStringSubmatch(raw(s, "/readyz?verbose"), -1)
			slices.SortFunc(found, func(a, b []string) int { return strings.Compare(a[1], b[1]) })
			return found
		},
		"compression": func(s *harness.Server) any {
			client, err := rest.HTTPClientFor(s.Config())
			if err != nil {
				t.Fatal(err)
			}
			s.Apply(`{apiVersion: v1, kind: ConfigMap, metadata: {name: long}, data: {x: "` +
				strings.Repeat("x", deflate.Threshold) + `"}}`)
			req, _ := http.NewRequest("GET", s.Config().Host+"/api/v1/configmaps", nil)
			req.Header.Set("Accept-Encoding", "gzip")
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			return resp.Header.Get("Content-Encoding")
		},
	} {
		if want, got := get(theirs), get(link.Server); !reflect.DeepEqual(want, got) {
			t.Errorf("%s: %v, and kube-apiserver has %v", name, got, want)
		}
	}
}
