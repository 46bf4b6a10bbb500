package main

import (
	"bytes"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"watershed.dev/platform/process"
	"watershed.dev/platform/telemetry/telemetrytest"
)

// TestBadInputIsALine checks that each command rejects bad input in a line that names the input.
func TestBadInputIsALine(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	for _, name := range []string{file, file + ".yaml"} {
		if err := os.WriteFile(name, []byte("no: such-setting\n"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	inputs := map[string]string{
		"upp":                               `watershed: unknown command "upp" for "watershed" (did you mean "up"?)`,
		"stats":                             `watershed: unknown command "stats" for "watershed" (did you mean "status"?)`,
		"statsu --watch=1s":                 `watershed: unknown command "statsu" for "watershed" (did you mean "status"?)`,
		"nope":                              `watershed: unknown command "nope" for "watershed"`,
		"help nope":                         `watershed help: unknown command "nope" for "watershed"`,
		"completion nope":                   `watershed completion: unknown command "nope" for "watershed completion"`,
		"--bogus":                           "watershed: unknown flag: --bogus",
		"up --etcd-server=x":                `watershed up: unknown flag: --etcd-server (did you mean "--etcd-servers"?)`,
		"up --secure-port=abc":              "watershed up: --secure-port=abc: not a port (1–65535)",
		"up --secure-port":                  "watershed up: --secure-port has no value: want --secure-port=VALUE",
		"up --data-dir=FILE":                `watershed up: --data-dir "FILE": mkdir FILE: not a directory`,
		"up --data-dir=FILE/x":              `watershed up: --data-dir "FILE/x": mkdir FILE: not a directory`,
		"up --data-dir=DIR --log-storage=x": `watershed up: --log-storage=x: want "file" or "memory"`,
		"up --data-dir=DIR --log-storage=memory --log-max-bytes=2147483648": "watershed up: --log-max-bytes=2147483648: " +
			"want at most 1073741824: NATS reserves the bytes for each event log (1) in memory (--log-storage)",
		"split --log-max-bytes=17179869184 --etcd-servers-overrides=/events#https://192.0.2.1:2379": "watershed split: " +
			"--log-max-bytes=17179869184: want at most 8589934592: NATS reserves the bytes for each event log (2) in file",
		"up --data-dir=DIR --authorization-config=/none": `watershed up: --authorization-config "/none": open /none: no`,
		"up --data-dir=DIR --service-cluster-ip-range=x": `watershed up: --service-cluster-ip-range "x": invalid CIDR`,
		"up --data-dir=DIR --authorization-config=FILE":  `watershed up: --authorization-config "FILE": failed to load`,
		"up --data-dir=DIR --etcd-servers=:::":           `watershed up: --etcd-servers ":::": want http://host:port, `,
		"up --data-dir=DIR --nats-url=:::":               "watershed up: --nats-url: want nats://host:port or tls:",
		"up --data-dir=DIR --bind-address=x":             `watershed up: --bind-address "x": not an IP address`,
		"up --data-dir=DIR --service-cluster-ip-range=10.0.0.0/30": `watershed up: --service-cluster-ip-range ` +
			`"10.0.0.0/30": a range must have at least 8`,
		"etcd":                     "watershed etcd: etcd: --data-dir is required",
		"nats":                     "watershed nats: nats: --data-dir is required",
		"etcd --data-dir=DIR":      "watershed etcd: etcd: --rpc-cert-file, --rpc-key-file and --rpc-ca-file are required",
		"gateway":                  "watershed gateway: --admission-addresses or --xds-servers is required: gateway calls admission",
		"xds":                      "watershed xds: --rpc-address is required; one of",
		"up --config=FILE":         `watershed up: --config "FILE": want a file whose name ends in .yaml, .json or .toml`,
		"gateway --etcd-servers=x": "watershed gateway: unknown flag: --etcd-servers: it is a flag of registry, which",
		"run":                      "watershed run: --target is required: want a list of registry, watchfanout",
		"run --target=absent":      "watershed run: --target=absent: no such service: want any of registry",
		"run --target=authn --x":   "watershed run: unknown flag: --x",
		"split --placement=x":      `watershed split: --placement "x": want any of all, compact, split`,
		"split --replicas=x=1":     "watershed split: --replicas x=1: want a name (",
		"split scale":              "watershed split scale: no service to scale: want name=number",
		"split scale x":            `watershed split scale: unknown argument "x": want name=number`,
		"snapshot bogus":           `watershed snapshot: unknown command "bogus": want save `,
		"migrate":                  "watershed migrate: --from is required",
		"migrate --from=/none":     `watershed migrate: --from "/none": open /none: no such file`,
		"migrate --from=FILE":      `watershed migrate: --from "FILE": it has no container kube-apiserver`,
		"version -o xml":           `watershed version: --output "xml": want "json" or "yaml"`,
		"man":                      "watershed man: 0 arguments: want the directory",
		"man FILE":                 "watershed man: mkdir FILE: not a directory",
		"status --data-dir=/none":  `watershed status: --data-dir "/none": no process runs in this directory`,
		"certgen":                  "watershed certgen: --namespace is required",
		"etcd --data-dir=FILE/x":   `watershed etcd: etcd: --data-dir "FILE/x": mkdir FILE: not a directory`,
	}
	for _, c := range commands(nil) {
		inputs[c.name+" --no-such-flag=1"] = "watershed " + c.name + ": unknown flag: --no-such-flag"
		inputs[c.name+" --config=/none.yaml"] = "watershed " + c.name + `: --config "/none.yaml": open /none.yaml: no`
		inputs[c.name+" --config=FILE.yaml"] = "watershed " + c.name + `: --config "FILE.yaml": unknown key "no"`
		if c.arguments == "" {
			inputs[c.name+" stray"] = "watershed " + c.name + `: unknown argument "stray": want --name=value`
		}
	}
	for input, want := range inputs {
		place := strings.NewReplacer("FILE", file, "DIR", t.TempDir())
		err := execute("watershed", strings.Fields(place.Replace(input)))
		if err == nil || !strings.HasPrefix(err.Error(), place.Replace(want)) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want %s", input, err, want)
		}
	}
	for input, want := range map[string]string{
		"--etcd-server=x": `kube-apiserver: unknown flag: --etcd-server (did you mean "--etcd-servers"?)`,
		"up":              `kube-apiserver: unknown argument "up": want --name=value`,
		"--cert-dir=x":    "kube-apiserver: [--etcd-servers must be specified, service-account-issuer is a",
	} {
		if err := execute(kubeAPIServerName, []string{input}); err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", input, err, want)
		}
	}
}

// TestWhatIsInUseIsNamed checks that a command ends with a line if another process has its address or its directory, or
// if its directory is a file. The line names the flag, the value and the remedy.
func TestWhatIsInUseIsNamed(t *testing.T) {
	if !telemetrytest.InProcessOfItsOwn(t) {
		return
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	store := t.TempDir()
	lock, err := process.LockStore(store)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	cluster, err := openLayout(t.TempDir(), "127.0.0.1", 6443, nil, logFiles{})
	if err != nil {
		t.Fatal(err)
	}
	defer cluster.close()
	replicas := filepath.Join(cluster.dir, "replicas.json")
	if err := os.WriteFile(replicas, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	place := strings.NewReplacer("PORT", l.Addr().String(), "STORE", store, "CLUSTER", cluster.dir, "FILE", replicas)
	const ended = ": stop the process that has the address, or choose another address"
	const inUse = " is in use by another process; stop it or choose another directory"
	const noDirectory = ": mkdir FILE: not a directory"
	etcd, nats := "etcd --listen-client-urls=unix:///a --data-dir=", "nats --data-dir="
	for _, c := range []struct{ input, names, ends string }{
		{etcd + "DIR --listen-client-urls=https://PORT", `--listen-client-urls "https://PORT"`, ended},
		{etcd + "DIR --listen-peer-urls=https://PORT", `--listen-peer-urls "https://PORT"`, ended},
		{etcd + "DIR --listen-metrics-urls=http://PORT", `--listen-metrics-urls "http://PORT"`, ended},
		{etcd + "STORE", `--data-dir "STORE"`, inUse},
		{etcd + "FILE", `--data-dir "FILE"`, noDirectory},
		{nats + "DIR --listen-address=PORT", `--listen-address "PORT"`, ended},
		{nats + "DIR --listen-address= --cluster-listen-address=PORT", `--cluster-listen-address "PORT"`, ended},
		{nats + "DIR --listen-address= --monitor-address=PORT", `--monitor-address "PORT"`, ended},
		{nats + "STORE", `--data-dir "STORE"`, inUse},
		{nats + "FILE", `--data-dir "FILE"`, noDirectory},
		{"xds --replicas-file=FILE --rpc-address=PORT", `--rpc-address "PORT"`, ended},
		{"authz --rpc-address=PORT --kubeconfig=CLUSTER/pki/authz.kubeconfig", `--rpc-address "PORT"`, ended},
		{"up --data-dir=CLUSTER", fmt.Sprintf(`--data-dir "CLUSTER" is in use by process %d`, os.Getpid()),
			"; stop it or choose another directory"},
	} {
		command, _, _ := strings.Cut(c.input, " ")
		input := strings.ReplaceAll(place.Replace(c.input), "DIR", t.TempDir())
		if id := cluster.pki.Identity(command); command != "up" {
			input += fmt.Sprintf(" --rpc-cert-file=%s --rpc-key-file=%s --rpc-ca-file=%s", id.CertFile, id.KeyFile, id.CAFile)
		}
		err := execute("watershed", strings.Fields(input))
		if err == nil {
			t.Errorf("%s: no error", input)
			continue
		}
		text := err.Error()
		if !strings.HasPrefix(text, "watershed "+command+": ") || !strings.Contains(text, place.Replace(c.names)) ||
			!strings.HasSuffix(text, place.Replace(c.ends)) || strings.Contains(text, "\n") {
			t.Errorf("%s: %s, want %s%s", input, text, place.Replace(c.names), place.Replace(c.ends))
		}
	}
}

// printed returns the output of a command, except of its run function.
func printed(t *testing.T, program string, args ...string) string {
	t.Helper()
	root := newProgram(program, args)
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs(args)
	if err := root.Execute(); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

// TestHelp checks that --help of commands with many flags lists the common flags, and that --help-all and
// kube-apiserver's --help list every flag in the groups of kube-apiserver and Watershed's own.
func TestHelp(t *testing.T) {
	root := printed(t, "watershed", "--help")
	for _, c := range commands(nil) {
		if !strings.Contains(root, "\n  "+c.name+" ") && c.group != "" {
			t.Errorf("the help lacks %s:\n%s", c.name, root)
		}
	}
	for _, command := range []string{"up", "split", "run", "gateway"} {
		short, all := printed(t, "watershed", command, "--help"), printed(t, "watershed", command, "--help-all")
		if n := strings.Count(short, "\n      --"); n < 8 || n > 20 {
			t.Errorf("%s: %d flags:\n%s", command, n, short)
		}
		if printed(t, "watershed", "help", command) != short {
			t.Errorf("help %s differs from %s --help", command, command)
		}
		if !strings.Contains(short, "Common flags:\n") || strings.Contains(all, "Common flags:\n") {
			t.Errorf("%s:\n%s\n%s", command, short, all)
		}
		listed, want := strings.Count(all, "\n      --")+strings.Count(all, "\n  -"), visible(declaredFlags(t, command))
		if listed != want+1 { // --help
			t.Errorf("%s --help-all has %d flags, want %d:\n%s", command, listed, want+1, all)
		}
	}
	upstream := printed(t, kubeAPIServerName, "--help")
	for _, group := range []string{"Generic", "Etcd", "Secure serving", "Auditing", "Features", "Authentication",
		"Authorization", "API enablement", "Egress selector", "Admission", "Metrics", "Logs", "Traces", "Misc",
		"Global", "Data directory", "Controllers", "Watch cache", "Event log"} {
		if !strings.Contains(upstream, "\n"+group+" flags:\n\n  ") {
			t.Errorf("kube-apiserver's help lacks the group %s:\n%s", group, upstream)
		}
	}
}

func declaredFlags(t *testing.T, command string) *pflag.FlagSet {
	t.Helper()
	cmd, _, err := newRoot([]string{command}).Find([]string{command})
	if err != nil {
		t.Fatal(err)
	}
	return cmd.Flags()
}

// TestEveryFlagHasAGroup checks that new flags of Watershed's own get a group in flagGroups.
func TestEveryFlagHasAGroup(t *testing.T) {
	for _, command := range []string{"up", "split", "run"} {
		flagGroups(declaredFlags(t, command)).FlagSets["global"].VisitAll(func(f *pflag.Flag) {
			if f.Name != "config" && f.Name != "help" && f.Name != "help-all" {
				t.Errorf("%s --%s has no group in ownGroups", command, f.Name)
			}
		})
	}
}

// TestCompletion checks that shells complete commands, flags, values and files.
func TestCompletion(t *testing.T) {
	files := fmt.Sprintf(":%d\n", cobra.ShellCompDirectiveDefault)
	none := fmt.Sprintf(":%d\n", cobra.ShellCompDirectiveNoFileComp)
	directories := fmt.Sprintf(":%d\n", cobra.ShellCompDirectiveFilterDirs)
	for _, c := range []struct{ args, want string }{
		{"spl", "split\t"},
		{"up --etcd-server", "--etcd-servers\t"},
		{"split scale --data", "--data-dir\t"},
		{"run --target ", "gateway\n"},
		{"split --placement=", "compact\n"},
		{"version -o ", "json\nyaml\n"},
		{"status -o ", "text\njson\n"},
		{"check -o ", "text\njson\n"},
		{"probe -o ", "text\njson\n"},
		{"capacity --output=", "text\njson\n"},
		{"snapshot save ", files},
		{"snapshot restore ", files},
		{"snapshot save a.db ", none},
		{"man ", directories},
		{"split scale ", none},
	} {
		args := append([]string{"__complete"}, strings.Split(c.args, " ")...)
		if out := printed(t, "watershed", args...); !strings.Contains(out, c.want) {
			t.Errorf("%s: %s", c.args, out)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if cmd, _, err := newRoot(nil).Find([]string{"completion", shell}); err != nil || cmd.Name() != shell {
			t.Errorf("%s: %v", shell, err)
		}
	}
}

// TestManualPages checks that each command has a manual page with its flags.
func TestManualPages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "man1")
	if err := execute("watershed", []string{"man", dir}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"watershed": "watershed-up(1)", "watershed-up": "etcd-servers", "watershed-split-scale": "NAME=NUMBER",
		"watershed-registry": "log-retention", "watershed-status": "addresses",
	} {
		page, err := os.ReadFile(filepath.Join(dir, name+".1"))
		if text := strings.ReplaceAll(string(page), "\\-", "-"); err != nil || !strings.Contains(text, want) {
			t.Errorf("%s: %v: no %s in\n%s", name, err, want, text)
		}
	}
}
