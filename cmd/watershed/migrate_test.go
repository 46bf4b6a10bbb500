package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"watershed.dev/platform/config"
)

func manifest(args ...string) []byte {
	text := `
spec:
  containers:
  - {name: sidecar, command: [sleep]}
  - name: kube-apiserver
    command: [/usr/local/bin/kube-apiserver]
    volumeMounts:
    - {mountPath: /etc/kubernetes/pki, name: pki}
    - {mountPath: /etc/kubernetes/pki/etcd/, name: etcd, subPath: kept}
    args:
`
	for _, a := range args {
		text += "    - '" + a + "'\n"
	}
	return []byte(text + "  volumes: [{name: pki, hostPath: {path: /srv/pki}}, " +
		"{name: etcd, hostPath: {path: /srv/etcd}}, {name: tmp, emptyDir: {}}]\n")
}

// migrated returns the migration of a manifest.
func migrated(t *testing.T, args ...string) *migration {
	t.Helper()
	given, err := flagsOf(manifest(args...))
	if err != nil {
		t.Fatal(err)
	}
	up := newUpFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	m := &migration{flags: up.FlagSet, settings: map[string]any{"data-dir": t.TempDir()}}
	for name, values := range given {
		m.convert(name, values)
	}
	m.setDefaults(given)
	return m
}

// The settings have kube-apiserver's flags with the paths of the host, and kube-apiserver's defaults.
func TestAManifestBecomesSettings(t *testing.T) {
	m := migrated(
		t,
		"--client-ca-file=/etc/kubernetes/pki/ca.crt",
		"--etcd-cafile",
		"/etc/kubernetes/pki/etcd/ca.crt",
		"--secure-port=7443",
		"--anonymous_auth=true",
		"--service-account-key-file=/a",
		"--service-account-key-file=/b",
		"--etcd-servers=https://a:1,https://b:2",
		"--profiling",
		"--advertise-address=192.0.2.1",
		"--advertise-address=192.0.2.2",
		"--feature-gates=WatchList=true",
		"--feature-gates=APIServerIdentity=true",
		"--tls-sni-cert-key=/etc/kubernetes/pki/a.crt,/etc/kubernetes/pki/a.key",
		"--tls-sni-cert-key=/b.crt,/b.key:b.example",
		"--tls-cert-file=/etc/kubernetes/pkix/x",
	)
	var out strings.Builder
	if err := m.print(&out, "m.yaml"); err != nil || len(m.blocked)+len(m.omitted) > 0 {
		t.Fatal(err, m.blocked, m.omitted)
	}
	path := filepath.Join(t.TempDir(), "settings.yaml")
	if err := os.WriteFile(path, []byte(out.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	up := newUpFlags(pflag.NewFlagSet("", pflag.ContinueOnError))
	if err := config.Load(up.FlagSet, []string{"--config", path}); err != nil {
		t.Fatalf("%v\n%s", err, &out)
	}
	disableAnonymous(up.FlagSet)
	for name, want := range map[string]string{
		"client-ca-file":              "/srv/pki/ca.crt",
		"etcd-cafile":                 "/srv/etcd/kept/ca.crt",
		"secure-port":                 "7443",
		"anonymous-auth":              "false",
		"service-account-key-file":    "[/a,/b]",
		"etcd-servers":                "[https://a:1,https://b:2]",
		"profiling":                   "true",
		"advertise-address":           "192.0.2.2",
		"feature-gates":               "WatchList=true,APIServerIdentity=true",
		"tls-sni-cert-key":            "[/srv/pki/a.crt,/srv/pki/a.key;/b.crt,/b.key:b.example]",
		"tls-cert-file":               "/etc/kubernetes/pkix/x",
		"authorization-mode":          "[AlwaysAllow]",
		"service-cluster-ip-range":    "10.0.0.0/24",
		"allow-privileged":            "false",
		"enable-bootstrap-token-auth": "false",

		"requestheader-username-headers": "[]",
	} {
		if got := up.Lookup(name).Value.String(); got != want {
			t.Errorf("--%s %q, not %q", name, got, want)
		}
	}
	if len(m.differences) != 11 { // the nine defaults, rejected anonymous requests, and a signing key
		t.Errorf("%q", m.differences)
	}
}

// The operator gets a note for each file with paths, because the migration converts only the paths of flags.
func TestFilesWithPathsAreReported(t *testing.T) {
	for _, name := range []string{"encryption-provider-config", "authorization-config", "audit-webhook-config-file",
		"authentication-token-webhook-config-file"} {
		want := fmt.Sprintf("the files that --%s names are not converted: ", name)
		if m := migrated(t, "--"+name+"=/etc/kubernetes/pki/x"); !slices.ContainsFunc(m.differences,
			func(d string) bool { return strings.HasPrefix(d, want) }) {
			t.Errorf("--%s: %q", name, m.differences)
		}
	}
}

// Unsupported flags are reported. A flag that the cluster needs blocks the migration.
func TestUnsupportedFlagsAreReported(t *testing.T) {
	for arg, want := range map[string]string{
		"--storage-backend=etcd3":          "",
		"--storage-backend=etcd9":          "left",
		"--watch-cache=true":               "",
		"--etcd-servers-overrides=/e#h://": "",
		"--secure-port=x":                  "blocked",
		"--no-such-flag=x":                 "blocked",
	} {
		m, got := migrated(t, arg), ""
		if len(m.omitted) > 0 {
			got += "left"
		}
		if len(m.blocked) > 0 {
			got += "blocked"
		}
		if got != want {
			t.Errorf("%s is %q, not %q: %q %q", arg, got, want, m.omitted, m.blocked)
		}
	}
	container := func(fields string) string { return "spec: {containers: [{" + fields + "}]}" }
	for name, text := range map[string]string{
		"no container kube-apiserver": container("name: x"),
		"is no flag":                  container("name: kube-apiserver, command: [sh, -c, kube-apiserver]"),
		"only the kubelet can expand": container("command: [kube-apiserver, --advertise-address=$(HOST_IP)]"),
		"cannot unmarshal":            "[]",
		"is no flag: this reads":      container("command: [kube-apiserver, x]"),
		"is no flag: this":            container(`command: [kube-apiserver, "--audit-x\rauthorization-mode: x"]`),
		"it has no container":         "",
	} {
		if _, err := flagsOf([]byte(text)); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%q: %v", text, err)
		}
	}
}
