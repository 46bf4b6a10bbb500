package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"debug/elf"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// tiny are the files of a repository with a program that prints its version, as two images.
var tiny = map[string]string{
	"go.mod":  "module tiny\n\ngo 1.26\n",
	"main.go": "package main\n\nvar release string\n\nfunc main() { print(release) }\n",
	"CHANGELOG.md": "\n## Unreleased\n\n- Later.\n\n## v0.1.0-rc.1\n\n- Rc.\n\n" +
		"## v0.1.01\n\n- No.\n\n## v0.1.0 - 2026\n\n- First.\n\n## v0.0.9\n",
	"deploy/k8s/base/gateway.yaml":         "image: watershed.dev/gateway:v0.0.9\n",
	"deploy/k8s/rendered/ha.yaml":          "image: watershed.dev/gateway:v0.0.9\nimage: other/image:1\n",
	"deploy/k8s/chart/Chart.yaml":          "name: watershed\nversion: 0.0.9\nappVersion: v0.0.9\n",
	"deploy/k8s/chart/values.yaml":         "image:\n  registry: watershed.dev\n",
	"deploy/k8s/chart/templates/test.yaml": "{{ \"watershed.dev/watershed:v0.0.9\" }}\n",
	"deploy/monitoring/alerts.yaml":        "groups: []\n",
	".gitignore":                           "/deploy/k8s/base/secret.yaml\n/deploy/k8s/chart/templates/local.yaml\n",
}

// repository makes the tiny repository the working directory, and returns the path of a key.
func repository(t *testing.T) (key string, public ed25519.PublicKey) {
	t.Helper()
	dir := t.TempDir()
	t.Chdir(dir)
	for path, text := range tiny {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("../rendered", "deploy/k8s/chart/files"); err != nil {
		t.Fatal(err)
	}
	for _, args := range []string{"init -q", "add -A", "-c user.name=a -c user.email=a@example.com commit -q -m a"} {
		if out, err := exec.Command("git", strings.Fields(args)...).CombinedOutput(); err != nil {
			t.Fatalf("git %s: %v: %s", args, err, out)
		}
	}
	all := packages
	packages = map[string]string{"gateway": ".", "watershed": "."}
	t.Cleanup(func() { packages = all })
	public, private, err := ed25519.GenerateKey(nil)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		t.Fatal(err)
	}
	key = filepath.Join(t.TempDir(), "key.pem")
	text := pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
	if err := os.WriteFile(key, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return key, public
}

// unpack returns the files of a compressed tar file.
func unpack(t *testing.T, data []byte) map[string]string {
	t.Helper()
	zipped, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for r := tar.NewReader(zipped); ; {
		h, err := r.Next()
		if err == io.EOF {
			return files
		}
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		files[h.Name] = string(text)
	}
}

// Two builds of a release are equal. Every file is in the signed checksums. The manifests, the bundle and the chart
// name images by the digests that are in the registry, for both platforms and with their SBOMs.
func TestARelease(t *testing.T) {
	key, public := repository(t)
	quiet := registry.Logger(log.New(io.Discard, "", 0))
	server := httptest.NewServer(registry.New(quiet, registry.WithReferrersSupport(true)))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://") + "/a"
	for _, ignored := range []string{"base/secret.yaml", "chart/templates/local.yaml"} {
		if err := os.WriteFile(filepath.Join("deploy/k8s", ignored), []byte("password"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var files [2]map[string][]byte
	for i := range files {
		out := filepath.Join(t.TempDir(), "out")
		o, err := parse([]string{"-release", "v0.1.0", "-out", out, "-key", key, "-registry", host, "-push",
			"-ldflags", "-X main.release=v0.1.0", "-platforms", "linux/amd64,linux/arm64"})
		if err == nil {
			err = o.runRelease()
		}
		if err == nil {
			files[i], err = walk(out)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	release := files[0]
	if !maps.EqualFunc(release, files[1], bytes.Equal) {
		t.Error("two builds differ")
	}
	sums := release["SHA256SUMS"]
	if !ed25519.Verify(public, sums, release["SHA256SUMS.sig"]) {
		t.Error("the signature is wrong")
	}
	for name, data := range release {
		line := fmt.Sprintf("%x  %s\n", sha256.Sum256(data), name)
		if !strings.HasPrefix(name, "SHA256SUMS") && !strings.Contains(string(sums), line) {
			t.Errorf("SHA256SUMS lacks %s", name)
		}
	}
	want := []string{"RELEASE_NOTES.md", "SHA256SUMS", "SHA256SUMS.sig", "gateway-linux-amd64.spdx.json",
		"gateway-linux-arm64.spdx.json", "gateway.tar", "images.txt", "watershed-0.1.0.tgz", "watershed-linux-amd64",
		"watershed-linux-amd64.spdx.json", "watershed-linux-arm64", "watershed-linux-arm64.spdx.json",
		"watershed-v0.1.0-ha.yaml", "watershed-v0.1.0-kustomize.tar.gz", "watershed.tar"}
	if got := slices.Sorted(maps.Keys(release)); !slices.Equal(got, want) {
		t.Errorf("files %v, want %v", got, want)
	}
	for arch, machine := range map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64} {
		f, err := elf.NewFile(bytes.NewReader(release["watershed-linux-"+arch]))
		if err != nil || f.Machine != machine {
			t.Errorf("%s: %v", arch, err)
		}
	}
	notes := string(release["RELEASE_NOTES.md"])
	if !strings.Contains(notes, "# Watershed v0.1.0\n") || !strings.HasSuffix(notes, "\n- First.\n") {
		t.Errorf("notes %q", notes)
	}
	rendered := string(release["watershed-v0.1.0-ha.yaml"])
	gateway := regexp.MustCompile(regexp.QuoteMeta(host) + `/gateway:v0\.1\.0@(sha256:[0-9a-f]{64})`)
	image := gateway.FindStringSubmatch(rendered)
	if image == nil || !strings.Contains(rendered, "other/image:1\n") ||
		!strings.Contains(string(release["images.txt"]), image[0]+"\n") {
		t.Fatalf("manifest %q, images %q", rendered, release["images.txt"])
	}
	bundle := unpack(t, release["watershed-v0.1.0-kustomize.tar.gz"])
	text := bundle["watershed-v0.1.0-kustomize/k8s/base/gateway.yaml"]
	if text != "image: "+image[0]+"\n" || len(bundle) != 3 {
		t.Errorf("bundle %v", bundle)
	}
	chart := unpack(t, release["watershed-0.1.0.tgz"])
	if chart["watershed/Chart.yaml"] != "name: watershed\nversion: 0.1.0\nappVersion: v0.1.0\n" ||
		chart["watershed/values.yaml"] != "image:\n  registry: "+host+"\n" ||
		!strings.HasPrefix(chart["watershed/files/ha.yaml"], "image: watershed.dev/gateway:v0.1.0@"+image[1]+"\n") ||
		!strings.Contains(chart["watershed/templates/test.yaml"], "watershed:v0.1.0@sha256:") || len(chart) != 4 {
		t.Errorf("chart %v", chart)
	}
	pushed(t, image[0])
	ref, err := name.NewTag(host + "/charts/watershed:0.1.0")
	if err != nil {
		t.Fatal(err)
	}
	if artefact, err := remote.Image(ref); err != nil {
		t.Error(err)
	} else if layers, err := artefact.Layers(); err != nil || len(layers) != 1 {
		t.Errorf("the chart has %d layers: %v", len(layers), err)
	}
}

// A tag of another digest stays, and nothing is pushed.
func TestATagIsNotOverwritten(t *testing.T) {
	repository(t)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	host := strings.TrimPrefix(server.URL, "http://")
	taken, err := name.NewTag(host + "/watershed:v0.1.0")
	if err == nil {
		err = remote.Write(taken, empty.Image)
	}
	if err != nil {
		t.Fatal(err)
	}
	o, err := parse([]string{"-release", "v0.1.0", "-out", filepath.Join(t.TempDir(), "out"), "-registry", host, "-push",
		"-unsigned"})
	if err != nil {
		t.Fatal(err)
	}
	if err := o.runRelease(); err == nil || !strings.Contains(err.Error(), "exists with another digest (sha256:") {
		t.Errorf("%v", err)
	}
	all, err := remote.Catalog(t.Context(), taken.Registry)
	if err != nil || !slices.Equal(all, []string{"watershed"}) {
		t.Errorf("the registry has %v, %v", all, err)
	}
}

// pushed checks that a registry has an image for both platforms, and the SBOM of each.
func pushed(t *testing.T, image string) {
	t.Helper()
	repository, digest, _ := strings.Cut(image, "@")
	tag, err := name.NewTag(repository)
	if err != nil {
		t.Fatal(err)
	}
	index, err := remote.Index(tag)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := index.Digest(); err != nil || got.String() != digest {
		t.Errorf("the registry has %s, the manifest %s: %v", got, digest, err)
	}
	manifest, err := index.IndexManifest()
	if err != nil {
		t.Fatal(err)
	}
	var platforms []string
	for _, m := range manifest.Manifests {
		platforms = append(platforms, m.Platform.String())
		bills, err := remote.Referrers(tag.Digest(m.Digest.String()))
		if err != nil {
			t.Fatal(err)
		}
		all, err := bills.IndexManifest()
		if err != nil || len(all.Manifests) != 1 || all.Manifests[0].ArtifactType != spdx {
			t.Errorf("SBOMs of %s: %+v, %v", m.Platform, all, err)
		}
	}
	if !slices.Equal(platforms, []string{"linux/amd64", "linux/arm64"}) {
		t.Errorf("platforms %v", platforms)
	}
}

// A bad value fails before the build. Its error is a line that names the flag, the value and the remedy.
func TestABadReleaseFails(t *testing.T) {
	key, _ := repository(t)
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	public := filepath.Join(t.TempDir(), "public")
	if err := errors.Join(os.WriteFile(public, nil, 0o600), os.Chmod(public, 0o640)); err != nil {
		t.Fatal(err)
	}
	with := func(args ...string) []string {
		return append([]string{"-release", "v0.1.0", "-key", key, "-out", filepath.Join(t.TempDir(), "out")}, args...)
	}
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-release", "1.2"}, `-release "1.2": want a semantic version such as v0.1.0`},
		{[]string{"-release", "v1"}, `-release "v1": want a semantic version`},
		{[]string{"-release", "v1.2.3+build"}, `-release "v1.2.3+build": want a semantic version`},
		{with("-key", "/none"), `-key "/none": no such file or directory: create a key with`},
		{with("-key", public), `: the file's mode is 0640, want 0600: create a key with`},
		{with("-key", garbage), `: not a PEM file: create a key with`},
		{with("-registry", "http://a"), `-registry "http://a": `},
		{with("-push"), `-push with -registry "watershed.dev": name your registry`},
		{with("-push", "-registry", "localhost:1"), `connection refused: start the registry, log in, or omit -push`},
		{with("-push", "-registry", "localhost:1", "-key", ""), `-push without -key: add -key FILE, or -unsigned`},
		{with("-push", "-registry", "localhost:1", "-key", "", "-unsigned"), `connection refused`},
		{with("-out", "."), `-out ".": the directory exists: remove it`},
		{with("-only", "watershed"), `-only "watershed" with -release: a release has all images`},
		{with("-platforms", "arm64"), `-platforms "arm64": want OS/ARCHITECTURE`},
	} {
		_, err := parse(c.args)
		if err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v: %v, want %q", c.args, err, c.want)
		}
	}
	if err := os.WriteFile("change", nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := parse(with()); err == nil || !strings.Contains(err.Error(), `("?? change"): commit or stash`) {
		t.Errorf("%v", err)
	}
}

// make and the shell do not run the parameters of `make release`.
func TestMakeReleaseRunsNoParameter(t *testing.T) {
	if _, err := exec.LookPath("make"); err != nil {
		t.Skip(err)
	}
	canary := filepath.Join(t.TempDir(), "canary")
	for _, text := range []string{
		`v0.1.0";touch ` + canary + `;:"`, `v0.1.0$(shell touch ` + canary + `)`, "v0.1.0$(touch " + canary + ")",
		"v0.1.0`touch " + canary + "`", `v0.1.0';touch ` + canary + `;:'`,
	} {
		args := []string{"-C", filepath.Join("..", ".."), "-s", "release"}
		for _, name := range []string{"VERSION", "KEY", "REGISTRY", "PLATFORMS", "PUSH", "UNSIGNED"} {
			args = append(args, name+"="+text)
		}
		out, err := exec.Command("make", args...).CombinedOutput()
		if err == nil || !strings.Contains(string(out), "images: invalid boolean value ") {
			t.Errorf("%s: %v: %s", text, err, out)
		}
		if _, err := os.Stat(canary); err == nil {
			t.Fatalf("%s ran", text)
		}
	}
}

// Every image of the project in the manifests is built, and has a digest in the files of a release.
func TestManifestsNameImagesByDigest(t *testing.T) {
	t.Chdir(filepath.Join("..", ".."))
	o := &options{registry: "registry.example.com:5000/a", tag: "v9.9.9"}
	var images []*image
	for name := range packages {
		images = append(images, &image{name: name, digest: v1.Hash{Algorithm: "sha256", Hex: strings.Repeat("0", 64)}})
	}
	files, err := o.manifests("deploy", images)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for path, data := range files {
		if strings.HasSuffix(path, "gz") {
			maps.Copy(all, unpack(t, data))
		} else {
			all[path] = string(data)
		}
	}
	count := 0
	named := regexp.MustCompile(`(watershed\.dev|registry\.example\.com:5000/a)/(` +
		strings.Join(slices.Collect(maps.Keys(packages)), "|") + `)[:@].*`)
	for path, text := range all {
		for _, m := range named.FindAllString(text, -1) {
			if count++; !strings.Contains(m, ":v9.9.9@sha256:0000") {
				t.Errorf("%s: %s has no digest", path, m)
			}
			if inChart := strings.HasPrefix(path, "watershed/"); inChart != strings.HasPrefix(m, project) {
				t.Errorf("%s: %s has the wrong registry", path, m)
			}
		}
	}
	if count < 60 || all["watershed/templates/overlay.yaml"] == "" || all["watershed-v9.9.9-ha.yaml"] == "" {
		t.Errorf("%d images in %v", count, slices.Sorted(maps.Keys(all)))
	}
}
