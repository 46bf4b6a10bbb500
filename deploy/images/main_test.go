package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Builds are reproducible. docker's reader accepts the image, which has one static file and an unprivileged user. The
// SBOM is beside it.
func TestAnImage(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	var files [2][]byte
	var dir string
	for i := range files {
		dir = t.TempDir()
		o, err := parse([]string{"-out", dir, "-only", "certgen", "-tag", "test"})
		if err != nil {
			t.Fatal(err)
		}
		if err := o.runImages(); err != nil {
			t.Fatal(err)
		}
		if files[i], err = os.ReadFile(filepath.Join(dir, "certgen.tar")); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(files[0], files[1]) {
		t.Error("two builds differ")
	}
	image, err := tarball.ImageFromPath(filepath.Join(dir, "certgen.tar"), nil)
	if err != nil {
		t.Fatal(err)
	}
	config, err := image.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if c := config.Config; c.User != "65532:65532" || !slices.Equal(c.Entrypoint, []string{"/certgen"}) ||
		c.Labels["org.opencontainers.image.title"] != "watershed certgen" {
		t.Errorf("%+v", c)
	}
	var bill struct {
		Packages []struct{ Name string }
	}
	data, err := os.ReadFile(filepath.Join(dir, "certgen-"+runtime.GOOS+"-"+runtime.GOARCH+".spdx.json"))
	if err == nil {
		err = json.Unmarshal(data, &bill)
	}
	if err != nil ||
		!slices.ContainsFunc(
			bill.Packages,
			func(p struct{ Name string }) bool { return p.Name == "k8s.io/client-go" },
		) {
		t.Errorf("the SBOM lacks k8s.io/client-go: %v", err)
	}
	for _, odd := range [][]string{{"-only", "nothing"}, {"-load", "rkt"}, {"-platforms", "linux"}, {"-push"}} {
		if _, err := parse(odd); err == nil {
			t.Errorf("%v is taken", odd)
		}
	}
}
