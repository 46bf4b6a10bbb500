// Package rules checks the code and the documents against the structure that docs/concepts/architecture.md describes.
package rules

import (
	"cmp"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"watershed.dev/test/harness"
)

// imports returns the direct imports of every package of the modules, and of every package behind them.
var imports = sync.OnceValues(func() (map[string][]string, error) {
	cmd := exec.Command("go", "list", "-deps", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "watershed.dev/proto/...",
		"watershed.dev/platform/...", "watershed.dev/services/...", "watershed.dev/cmd/...")
	cmd.Dir = harness.Root()
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%v: %w", cmd, err)
	}
	all := map[string][]string{}
	for line := range strings.Lines(string(out)) {
		names := strings.Fields(line)
		all[names[0]] = names[1:]
	}
	return all, nil
})

// packages returns the packages below a directory with their direct imports.
func packages(t *testing.T, dir string) map[string][]string {
	t.Helper()
	all, err := imports()
	if err != nil {
		t.Fatal(err)
	}
	below := map[string][]string{}
	for p, direct := range all {
		if strings.HasPrefix(p+"/", "watershed.dev/"+dir+"/") {
			below[p] = direct
		}
	}
	if len(below) == 0 {
		t.Fatalf("%s has no packages", dir)
	}
	return below
}

// deps returns the packages below a directory, and every package that they import, directly or indirectly.
func deps(t *testing.T, dir string) []string {
	t.Helper()
	all, _ := imports()
	seen := map[string]bool{}
	var visit func(p string)
	visit = func(p string) {
		if !seen[p] {
			seen[p] = true
			for _, direct := range all[p] {
				visit(direct)
			}
		}
	}
	for p := range packages(t, dir) {
		if dir != "platform" || p != crdPackage { // only registry and admission may import it
			visit(p)
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// crdPackage is the package that reads CustomResourceDefinitions, with most of apiextensions-apiserver behind it.
const crdPackage = "watershed.dev/platform/crd"

func TestCRDsAreReadByRegistryAndAdmissionOnly(t *testing.T) {
	for _, dir := range []string{"services/gateway", "services/authn", "services/authz", "services/watchfanout"} {
		if slices.Contains(deps(t, dir), crdPackage) {
			t.Errorf("%s imports %s", dir, crdPackage)
		}
	}
}

func TestModulesImportOnlyWhatTheyMay(t *testing.T) {
	for dir, never := range map[string][]string{
		"services/watchfanout": {"k8s.io/kubernetes", "k8s.io/api/", "k8s.io/apiserver",
			"k8s.io/client-go", "go.etcd.io/etcd"},
		"platform/watchcache": {"k8s.io/kubernetes", "k8s.io/api/", "k8s.io/apiserver", "k8s.io/client-go"},
		"services/gateway":    {"k8s.io/kubernetes", "go.etcd.io/etcd/server", "github.com/nats-io"},
		"services/authn":      {"github.com/nats-io"},
		"services/authz":      {"github.com/nats-io"},
		"services/admission":  {"github.com/nats-io"},
		"platform":            {"k8s.io/kubernetes", "go.etcd.io/etcd"},
		"cmd/certgen":         {"k8s.io/kubernetes", "github.com/nats-io", "go.etcd.io/etcd"},
		"cmd/embedded":        {"k8s.io/kubernetes", "k8s.io/apiserver", "k8s.io/client-go"},
		"cmd/xds":             {"k8s.io/kubernetes", "k8s.io/apiserver", "github.com/nats-io", "go.etcd.io/etcd"},
		"proto":               {"k8s.io/"},
	} {
		t.Run(dir, func(t *testing.T) {
			for _, p := range deps(t, dir) {
				for _, n := range never {
					if strings.HasPrefix(p, n) && !slices.Contains(definitions, p) {
						t.Errorf("%s imports %s", dir, p)
					}
				}
			}
		})
	}
}

// definitions are packages of upstream that any service may import: the names of feature gates, and the metrics of the
// watch cache. They have no API types.
var definitions = []string{"k8s.io/kubernetes/pkg/features", "k8s.io/apiserver/pkg/features",
	"k8s.io/apiserver/pkg/util/feature", "k8s.io/apiserver/pkg/storage/cacher/metrics"}

func TestNoServiceImportsAnother(t *testing.T) {
	services := []string{"gateway", "authn", "authz", "admission", "registry", "watchfanout"}
	for _, s := range services {
		for _, p := range deps(t, "services/"+s) {
			rest, ok := strings.CutPrefix(p, "watershed.dev/services/")
			if ok && strings.SplitN(rest, "/", 2)[0] != s {
				t.Errorf("%s imports %s", s, p)
			}
		}
	}
}

// TestOnlyRegistryOpensEtcd checks that only registry imports etcd's client.
func TestOnlyRegistryOpensEtcd(t *testing.T) {
	for _, dir := range []string{"services/gateway", "services/authn", "services/authz", "services/admission",
		"services/watchfanout", "platform"} {
		for p, direct := range packages(t, dir) {
			for _, name := range direct {
				if strings.Contains(name, "go.etcd.io/etcd/client") || strings.Contains(name, "storagebackend") {
					t.Errorf("%s imports %s", p, name)
				}
			}
		}
	}
}

// floors are the layers of each service's packages, from the bottom up. A package imports only packages of lower
// layers. The root package, named ".", only assembles the others.
var floors = map[string][][]string{
	"platform": {
		{
			"config", "deflate", "egress", "events", "features", "frame", "recovery", "identity", "admissionrules", "lru",
			"patchlimit", "paths", "pki", "porttest", "reload", "socket", "telemetry/telemetrytest", "usertimeout",
			"version", "warnings", "watchable", "zaplog",
		},
		{"kubeversion", "lifecycle", "loopback", "reload/reloadtest", "telemetry", "watchcache/core"},
		{"rpc"},
		{"apiclient", "discovery", "coalesce", "crd", "eventlog"},
		{"process", "watchcache/cache"},
		{"watchcache/query"},
		{"watchcache/conversion", "watchcache/logreader"},
		{"watchcache/list", "watchcache/watch", "watchcache/internal/fixture"},
		{"watchcache"},
	},
	"services/authn":     {{"."}, {"cmd/authn"}},
	"services/authz":     {{"."}, {"cmd/authz"}},
	"services/admission": {{"."}, {"cmd/admission"}},
	"cmd/watershed":      {{"inspect"}, {"capacity", "check", "probe", "snapshot"}, {"."}},
	"cmd/certgen":        {{"."}, {"cmd/certgen"}},
	"cmd/embedded":       {{"."}, {"cmd/etcd", "cmd/nats"}},
	"cmd/xds":            {{"."}, {"cmd/xds"}},
	"services/gateway": {
		{"audit", "upgrade", "turns"},
		{"responsewriters", "h2writer"},
		{"body", "delegatedauth", "watch", "proxy", "aggregation", "flowcontrol"},
		{"discovery", "openapi", "routing", "server"},
		{"console"},
		{"."},
		{"cmd/gateway"},
	},
	"services/watchfanout": {{"."}, {"cmd/watchfanout"}},
	"services/registry": {
		{"storage", "election", "etcdstatus", "managed"},
		{"handlers"},
		{"installer", "customresources"},
		{"lookup", "conversion", "controllers", "publisher"},
		{"objects", "source", "discovery", "loopback"},
		{"internalwatch"},
		{"internal/fixture"},
		{"."},
		{"cmd/registry"},
	},
}

func TestNoPackageImportsUpwards(t *testing.T) {
	for service, all := range floors {
		floor := map[string]int{}
		for i, names := range all {
			for _, n := range names {
				floor[strings.TrimSuffix("watershed.dev/"+service+"/"+n, "/.")] = i
			}
		}
		for name, direct := range packages(t, service) {
			own, ok := floor[name]
			if !ok {
				t.Errorf("%s is on no floor of %s", name, service)
				continue
			}
			for _, p := range direct {
				if below, ours := floor[p]; ours && below >= own {
					t.Errorf("%s imports %s, which is not below it", name, p)
				}
			}
		}
	}
}

// TestPolicyStaysInTheMainEtcd checks that --etcd-servers-overrides rejects every resource whose age authn, authz and
// admission measure.
func TestPolicyStaysInTheMainEtcd(t *testing.T) {
	read := func(path string) string {
		text, err := os.ReadFile(harness.Root() + "/services/" + path)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	rejected, tracked := read("registry/storage/overrides.go"), 0
	path := regexp.MustCompile(`"/(?:api|apis/([a-z0-9.]+))/v1(?:beta1)?/([a-z]*)"`)
	for _, file := range []string{"admission/admission.go", "authn/authn.go", "authz/authz.go"} {
		for _, m := range path.FindAllStringSubmatch(read(file), -1) {
			want := fmt.Sprintf("{Group: %q, Resource: %q}", m[1], cmp.Or(m[2], "*"))
			if m[1] == "" {
				want = fmt.Sprintf("{Resource: %q}", m[2])
			}
			if tracked++; !strings.Contains(rejected, want) {
				t.Errorf("%s tracks the age of %s", file, m[0])
			}
		}
	}
	if tracked < 10 {
		t.Errorf("%d paths are found", tracked)
	}
}
