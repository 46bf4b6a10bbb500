package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"watershed.dev/platform/process"
)

// plannedSplit returns the processes that split would run in dir.
func plannedSplit(t *testing.T, replicas map[string]int, flags ...string) []*child {
	t.Helper()
	return plannedOn(t, "unix", replicas, flags...)
}

// plannedOn is plannedSplit with a value of --rpc-network.
func plannedOn(t *testing.T, network string, replicas map[string]int, flags ...string) []*child {
	t.Helper()
	counts, err := replicaCounts(replicas)
	if err != nil {
		t.Fatal(err)
	}
	l, err := openLayout(t.TempDir(), "0.0.0.0", 6443, nil, logFiles{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.close)
	fs := pflag.NewFlagSet("split", pflag.ContinueOnError)
	services := newSplitFlags(fs)
	if err := fs.Parse(append([]string{"--v=2"}, flags...)); err != nil {
		t.Fatal(err)
	}
	s := &splitRun{
		layout:          l,
		counts:          counts,
		fromCommandLine: services.fromCommandLine(fs),
		bind:            "127.0.0.1",
		network:         network,
	}
	processes, err := s.plan()
	if err != nil {
		t.Fatal(err)
	}
	return processes
}

// A process that ends twice with the same error is not restarted if onRefused returns true. A process that panics, is
// killed or ends with another error is restarted.
func TestRefusedProcessesAreNotRestarted(t *testing.T) {
	spawn := make(spawner)
	go spawn.run()
	t.Cleanup(func() { close(spawn) })
	for name, c := range map[string]struct {
		script string
		once   bool // onRefused is called once, and the process is not restarted
	}{
		"a reason":      {"echo 'watershed x: why' >&2; exit 1", true},
		"other reasons": {"echo \"watershed x: $$\" >&2; exit 1", false},
		"a panic":       {"echo 'watershed x: why' >&2; exit 2", false},
		"a kill":        {"echo 'watershed x: why' >&2; kill -9 $$", false},
		"no word":       {"exit 1", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := t.TempDir()
			runs := filepath.Join(dir, "runs")
			errs := make(chan error, 10)
			p := &child{
				name: "x-0", dir: dir, command: "x", program: "/bin/sh",
				args:      []string{"-c", "echo >> " + runs + "; " + c.script},
				onRefused: func(why error) bool { errs <- why; return true },
			}
			p.start(spawn)
			if c.once {
				if why := <-errs; why.Error() != "x-0: why" {
					t.Errorf("onRefused(%q)", why)
				}
				<-p.done
				return
			}
			for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
				if b, _ := os.ReadFile(runs); len(b) > 2 {
					break
				}
				if time.Now().After(deadline) {
					t.Fatal("it was not started again")
				}
			}
			p.stop()
			if len(errs) > 0 {
				t.Errorf("it was refused: %v", <-errs)
			}
		})
	}
}

func settingsIn(t *testing.T, file string) map[string]any {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]any{}
	if err := yaml.Unmarshal(data, &out); err != nil {
		t.Fatal(err)
	}
	return out
}

// Every process is configured with its identity and the addresses of its dependencies, and with no unknown setting.
func TestProcessSettings(t *testing.T) {
	var names, addresses []string
	values := map[string]map[string]any{}
	for _, p := range plannedSplit(t, map[string]int{"watchfanout": 3, "etcd": 3}) {
		names = append(names, p.name)
		values[p.name] = settingsIn(t, p.config)
		m := moduleOf(p.command)
		if m == nil { // etcd or NATS
			continue
		}
		settings := values[p.name]
		if a, ok := settings["rpc-address"].(string); ok {
			addresses = append(addresses, a)
		}
		for _, peer := range m.DependsOn {
			if all, _ := settings[peer+"-addresses"].(string); all == "" {
				t.Errorf("%s has no address of %s", p.name, peer)
			}
		}
		if settings["rpc-cert-file"] == "" || fmt.Sprint(settings["v"]) != "2" {
			t.Errorf("%s: %v", p.name, settings)
		}
		// the command of the service accepts the file
		if err := process.CheckConfig(m, p.config); err != nil {
			t.Errorf("%s: %v", p.name, err)
		}
	}
	slices.Sort(names)
	want := "admission-0 authn-0 authz-0 etcd-0 etcd-1 etcd-2 gateway-0 gateway-1 nats-0 registry-0 registry-1 " +
		"watchfanout-0 watchfanout-1 watchfanout-2 xds-0"
	if got := strings.Join(names, " "); got != want {
		t.Errorf("%s", got)
	}
	slices.Sort(addresses)
	if n := len(slices.Compact(addresses)); n != 8 {
		t.Errorf("%d addresses of 8 servers: %q", n, addresses)
	}
	if got := strings.Count(values["gateway-0"]["watchfanout-addresses"].(string), ","); got != 2 {
		t.Errorf("a gateway knows %v", values["gateway-0"]["watchfanout-addresses"])
	}
	if got := values["etcd-1"]["initial-cluster"].(string); strings.Count(got, "https://") != 3 {
		t.Errorf("a member knows %s", got)
	}
}

// Services listen on the network of --rpc-network, and their clients have these addresses.
func TestServicesAreAtSocketsOrPorts(t *testing.T) {
	for network, prefix := range map[string]string{"unix": "unix:/", "tcp": "127.0.0.1:"} {
		addresses := 0
		for _, p := range plannedOn(t, network, nil) {
			for key, v := range settingsIn(t, p.config) {
				if key != "rpc-address" && key != "xds-servers" && !strings.HasSuffix(key, "-addresses") {
					continue
				}
				for a := range strings.SplitSeq(v.(string), ",") {
					addresses++
					if !strings.HasPrefix(a, prefix) {
						t.Errorf("%s: %s: %s has %q", network, p.name, key, a)
					}
				}
			}
		}
		if addresses < 20 {
			t.Errorf("%s: %d addresses are configured", network, addresses)
		}
	}
}

// Settings of the directory that conflict with a flag are omitted.
func TestConflictingSettingsAreOmitted(t *testing.T) {
	const plugins, keys = "enable-admission-plugins", "service-account-key-file"
	for flag, left := range map[string]map[string]bool{
		"": {plugins: true, keys: true, kubeletCA: true},
		"--disable-admission-plugins=PodSecurity":                 {plugins: true, keys: true, kubeletCA: true},
		"--disable-admission-plugins=PodSecurity,NodeRestriction": {keys: true, kubeletCA: true},
		"--service-account-signing-endpoint=/s":                   {plugins: true, kubeletCA: true},
		"--client-ca-file=/ca.crt":                                {plugins: true, keys: true},
	} {
		var flags []string
		if flag != "" {
			flags = []string{flag}
		}
		has := map[string]bool{}
		for _, p := range plannedSplit(t, nil, flags...) {
			for name := range settingsIn(t, p.config) {
				has[name] = true
			}
		}
		for _, name := range []string{plugins, keys, kubeletCA} {
			if has[name] != left[name] {
				t.Errorf("%q: --%s is there: %v", flag, name, has[name])
			}
		}
	}
}

// split passes each service its own flags, and the settings that derive from them.
func TestSplitHandsFlagsOn(t *testing.T) {
	settings := map[string]map[string]any{}
	for _, p := range plannedSplit(t, nil, "--authorization-mode=RBAC,AlwaysAllow", "--anonymous-auth=true",
		"--service-account-issuer=https://a", "--service-account-issuer=https://b", "--watch-ring-bytes=65536",
		"--enable-admission-plugins=NodeRestriction", "--event-ttl=2h", "--tls-sni-cert-key=/a.crt,/a.key",
		"--tls-sni-cert-key=/b.crt,/b.key:b.example", "--oidc-required-claim=a=b,c", "--oidc-required-claim=d=e", "--tracing-sampling-ratio=0.5") {
		settings[p.command] = settingsIn(t, p.config)
		if m := moduleOf(p.command); m != nil {
			if err := process.CheckConfig(m, p.config); err != nil {
				t.Errorf("%s: %v", p.name, err)
			}
		}
	}
	for _, want := range []struct{ service, name, value string }{
		{"authz", "authorization-mode", "[RBAC AlwaysAllow]"},
		{"authn", "anonymous-auth", "false"},
		{"authn", "service-account-issuer", "[https://a https://b]"},
		{"registry", "service-account-issuer", "[https://a https://b]"},
		{"gateway", "api-audiences", "[https://a https://b]"},
		{"watchfanout", "watch-ring-bytes", "65536"},
		{"admission", "enable-admission-plugins", "[NodeRestriction]"},
		{"registry", "event-ttl", "2h0m0s"},
		{"xds", "tracing-sampling-ratio", "0.5"},
		{"gateway", "v", "2"},
		{"gateway", "tls-sni-cert-key", "[/a.crt,/a.key /b.crt,/b.key:b.example]"},
		{"authn", "oidc-required-claim", "[a=b,c d=e]"},
	} {
		if got := fmt.Sprint(settings[want.service][want.name]); got != want.value {
			t.Errorf("%s: --%s %s, not %s", want.service, want.name, got, want.value)
		}
	}
	if _, ok := settings["gateway"]["watch-ring-bytes"]; ok {
		t.Error("the gateway is told what it does not know")
	}
}

// An invalid number of replicas is rejected with the name of the flag.
func TestInvalidReplicasAreRejected(t *testing.T) {
	for _, odd := range []map[string]int{{"nobody": 1}, {"gateway": 0}, {"etcd": -1}} {
		if _, err := replicaCounts(odd); err == nil || !strings.HasPrefix(err.Error(), "--replicas ") {
			t.Errorf("%v: %v", odd, err)
		}
	}
	counts, err := replicaCounts(map[string]int{"gateway": 5})
	if err != nil || counts["gateway"] != 5 || counts["authn"] != 1 || defaultReplicas["gateway"] != 2 {
		t.Errorf("%v, %v", counts, err)
	}
}

// up passes each service the flags that services share. Settings of the data directory apply only to flags that are not
// set.
func TestUpHandsFlagsOn(t *testing.T) {
	command := pflag.NewFlagSet("up", pflag.ContinueOnError)
	all := map[string]*service{}
	for _, m := range modules {
		all[m.Name] = newService(m, command)
	}
	if err := command.Parse([]string{"--service-account-issuer=https://a", "--service-account-issuer=https://b",
		"--secure-port=7443"}); err != nil {
		t.Fatal(err)
	}
	for _, m := range modules {
		if err := all[m.Name].copyFlags(command); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"authn", "registry"} {
		issuers, err := all[name].flags.GetStringArray("service-account-issuer")
		if err != nil {
			issuers, err = all[name].flags.GetStringSlice("service-account-issuer")
		}
		if err != nil || !slices.Equal(issuers, []string{"https://a", "https://b"}) {
			t.Errorf("%s: %q, %v", name, issuers, err)
		}
	}
	for _, name := range []string{"gateway", "registry"} {
		if port, err := all[name].flags.GetInt("secure-port"); err != nil || port != 7443 {
			t.Errorf("%s: %d, %v", name, port, err)
		}
	}
	if err := all["gateway"].applyDefaults(map[string]any{"secure-port": 1, "bind-address": "192.0.2.7"}); err != nil {
		t.Fatal(err)
	}
	port, _ := all["gateway"].flags.GetInt("secure-port")
	bind, _ := all["gateway"].flags.GetString("bind-address")
	if port != 7443 || bind != "192.0.2.7" {
		t.Errorf("%d %s", port, bind)
	}
}

// Only the owner can read a data directory.
func TestKubeconfigsAreTheirOwners(t *testing.T) {
	l, err := openLayout(t.TempDir(), "0.0.0.0", 6443, []string{"example.com"}, logFiles{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	for _, name := range []string{"authn", "authz", "admission"} {
		if info, err := os.Stat(l.pki.Kubeconfig(name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", name, info, err)
		}
	}
	if info, err := os.Stat(l.pki.AdminKubeconfig()); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", info, err)
	}
}

// Each gateway has its own audit log.
func TestAnAuditLogIsOneProcess(t *testing.T) {
	for n, want := range []string{"/x/audit.log", "/x/audit-1.log", "/x/audit-2.log"} {
		if got := perProcessPath("/x/audit.log", n); got != want {
			t.Errorf("%s is not %s", got, want)
		}
	}
	if got := perProcessPath("-", 2); got != "-" {
		t.Errorf("standard output became %s", got)
	}
}
