package e2e_test

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	_ "k8s.io/component-base/logs/json/register" // the flags of the JSON format
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

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
			t.Errorf("%s: %v: %s", command, err, lastLine(out))
		}
	}
}

// splitSets are the flags that split sets for its processes.
var splitSets = []string{"etcd-servers", "etcd-cafile", "etcd-certfile", "etcd-keyfile", "permit-port-sharing"}

func lastLine(out []byte) string {
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	return lines[len(lines)-1]
}

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
	out, err = migrate("--etcd-servers-overrides=/events#http://127.0.0.1:1", "--no-such-flag=1")
	if err == nil || !strings.Contains(out, "--etcd-servers-overrides") || !strings.Contains(out, "--no-such-flag") {
		t.Errorf("%v: %s", err, out)
	}
}

// TestKubeAPIServerByName checks that a link to Watershed called kube-apiserver runs with kube-apiserver's defaults,
// and keeps its state in --cert-dir.
func TestKubeAPIServerByName(t *testing.T) {
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
	} {
		if out, code := run(args...); !strings.Contains(out, want) || (code == 0) != (args[0] == "--version") {
			t.Errorf("%q: %d %s", args, code, out)
		}
	}
	if out, code := run("--help"); code != 0 || strings.Contains(out, "--insecure-port") {
		t.Errorf("--help: %d %s", code, out)
	}
}
