package features

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
)

// A gate that Watershed does not implement is rejected by name, with the value to set. Its default and other gates are
// accepted.
func TestUnimplementedGatesAreRejected(t *testing.T) {
	defer func() {
		if err := checkReplaced(); err != nil {
			t.Errorf("after the test: %v", err)
		}
	}()
	set := func(text string) error {
		fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
		AddFlag(fs)
		return fs.Set("feature-gates", text)
	}
	for name, gate := range replacedGates {
		standard := utilfeature.DefaultMutableFeatureGate.GetAll()[name].Default
		if gate.rejected == "" {
			continue
		}
		err := set(fmt.Sprintf("kube:%s=%t", name, !standard))
		remedy := fmt.Sprintf("; set %s=%t", name, standard)
		if err == nil || !strings.Contains(err.Error(), gate.rejected+remedy) {
			t.Errorf("%s: %v", name, err)
		}
		if err := set(fmt.Sprintf("%s=%t", name, standard)); err != nil {
			t.Errorf("%s at its default: %v", name, err)
		}
	}
}

// A server without beta features starts. The start names each gate that Watershed accepts and ignores.
func TestGatesWithoutEffectAreNamed(t *testing.T) {
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	AddFlag(fs)
	if lines := WithoutEffect(); len(lines) > 0 {
		t.Errorf("the defaults: %q", lines)
	}
	var disabled, enabled []string
	for name, spec := range utilfeature.DefaultMutableFeatureGate.GetAll() {
		if spec.Default && spec.PreRelease == featuregate.Beta && !spec.LockToDefault {
			disabled, enabled = append(disabled, string(name)+"=false"), append(enabled, string(name)+"=true")
		}
	}
	if err := fs.Set("feature-gates", strings.Join(disabled, ",")); err != nil {
		t.Error(err)
	}
	defer func() {
		if err := fs.Set("feature-gates", strings.Join(enabled, ",")); err != nil {
			t.Error(err)
		}
	}()
	want := []string{
		"ListFromCacheSnapshot=false changes nothing: the watch cache serves pages from snapshots",
		"SizeBasedListCostEstimate=false changes nothing: the size of a list is always its cost",
	}
	if lines := WithoutEffect(); !slices.Equal(lines, want) {
		t.Errorf("got %q", lines)
	}
}

// replacedGates has every gate that upstream reads in code that Watershed does not link, except gates that cannot
// change.
func TestReplacedGatesAreComplete(t *testing.T) {
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/apiserver").Output()
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(strings.TrimSpace(string(out)), "pkg")
	read := regexp.MustCompile(`Enabled\((?:generic|zpages)?features\.(\w+)`)
	known := utilfeature.DefaultMutableFeatureGate.GetAll()
	var found []string
	for _, dir := range []string{"server", "endpoints", "storage/cacher", "registry/generic/registry"} {
		err := filepath.WalkDir(filepath.Join(root, dir), func(path string, e os.DirEntry, err error) error {
			skip := strings.Contains(path, "encryptionconfig") || // linked
				!strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go")
			if err != nil || e.IsDir() || skip {
				return err
			}
			text, err := os.ReadFile(path)
			for _, m := range read.FindAllSubmatch(text, -1) {
				found = append(found, string(m[1]))
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	slices.Sort(found)
	for _, name := range slices.Compact(found) {
		for gate, spec := range known {
			if _, listed := replacedGates[gate]; string(gate) == name && !spec.LockToDefault && !listed {
				t.Errorf("%s is not in replacedGates", name)
			}
		}
	}
	if len(found) < 20 {
		t.Errorf("upstream reads only the gates %q", found)
	}
}

// An unknown gate is rejected with kube-apiserver's text. The test is the last, because the gates keep the error.
func TestUnknownGatesAreRejected(t *testing.T) {
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	AddFlag(fs)
	if err := fs.Set("feature-gates", "AllAlpha=false"); err != nil {
		t.Error(err)
	}
	if err := fs.Set("feature-gates", "NoSuchGate=true"); err == nil ||
		!strings.Contains(err.Error(), "unrecognized feature gate: NoSuchGate") {
		t.Errorf("an unknown gate: %v", err)
	}
}
