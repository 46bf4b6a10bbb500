package inspect

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"watershed.dev/platform/process"
)

// A data directory lists the debug addresses of its processes. If no process runs, the error names the flag to set.
func TestDebugAddresses(t *testing.T) {
	dir := t.TempDir()
	if _, err := debugAddresses(dir); err == nil || !strings.Contains(err.Error(), "--data-dir") {
		t.Errorf("%v", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "config"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"watchfanout-0": "debug-address: /x/watchfanout-0.sock\ntarget: [watchfanout]\n",
		"xds-0":         "debug-address: /x/xds-0.sock\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, "config", name+".yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := debugAddresses(dir); err == nil { // of an earlier split
		t.Error("a stopped split has addresses")
	}
	lock, err := process.Lock(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	all, err := debugAddresses(dir)
	if services := all["/x/watchfanout-0.sock"]; err != nil || len(all) != 2 || len(services) != 1 ||
		!slices.Equal(all["/x/xds-0.sock"], []string{"xds"}) { // xds does not listen
		t.Errorf("%q, %v", all, err)
	}
}

// A gateway's own report is compared with this machine's clock. A server without reports is an error.
func TestReportsOfAGateway(t *testing.T) {
	older := false
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if older || r.URL.Path != "/metrics" || r.URL.Query().Get("view") != "processes" {
			w.Header().Set("Content-Type", "text/plain")
			return
		}
		process.WriteReports(w, &process.Report{Services: []string{"gateway"}, Time: time.Now().Add(-time.Minute)},
			&process.Report{Services: []string{"authn"}, SkewSeconds: 3})
	}))
	defer server.Close()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	text := `{apiVersion: v1, kind: Config, current-context: x, contexts: [{name: x, context: {cluster: c}}],
clusters: [{name: c, cluster: {server: "` + server.URL + `"}}]}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	o := &Options{Kubeconfig: path}
	all, err := o.Reports(t.Context(), process.Shallow)
	if err != nil || len(all) != 2 || all[0].SkewSeconds != 3 || all[1].SkewSeconds > -59 {
		t.Errorf("%+v, %v", all, err)
	}
	older = true
	_, err = o.Reports(t.Context(), process.Shallow)
	if err == nil || !strings.Contains(err.Error(), "older release") {
		t.Errorf("%v", err)
	}
}

// kubectl's kubeconfig may be of another cluster. A data directory that the user names, or that belongs to another
// user, is not replaced by it.
func TestANamedDataDirectoryExcludesKubectlsKubeconfig(t *testing.T) {
	kubeconfig := filepath.Join(t.TempDir(), "config")
	text := `{apiVersion: v1, kind: Config, current-context: x, contexts: [{name: x, context: {cluster: c}}],
clusters: [{name: c, cluster: {server: "https://other"}}]}`
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("KUBECONFIG", kubeconfig)
	t.Chdir(t.TempDir())
	host := func(args ...string) string {
		t.Helper()
		fs := pflag.NewFlagSet("", pflag.ContinueOnError)
		var o Options
		o.AddFlags(fs)
		if err := fs.Parse(args); err != nil {
			t.Fatal(err)
		}
		c, err := o.Config()
		if err != nil {
			return err.Error()
		}
		return c.Host
	}
	if got := host(); got != "https://other" {
		t.Errorf("without flags: %s", got)
	}
	if got := host("--data-dir=none"); !strings.Contains(got, `--data-dir "none": no process runs in this directory`) {
		t.Errorf("with --data-dir: %s", got)
	}
	if err := os.Mkdir(".watershed", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := os.ReadDir(".watershed"); err == nil {
		t.Skip("this user reads every directory")
	}
	if got := host(); !strings.Contains(got, "permission denied") {
		t.Errorf("with a data directory of another user: %s", got)
	}
}
