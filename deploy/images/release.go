package main

import (
	"bytes"
	"compress/gzip"
	"crypto"
	"crypto/ed25519"
	"crypto/sha256"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/mod/semver"
)

// project is the registry in the manifests of the repository. No image is there.
const project = "watershed.dev"

var registryName = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*$`)

// parseRelease checks the options of a release, so that a bad value fails before the build.
func (o *options) parseRelease(version, keyFile string) (err error) {
	if semver.Canonical(version) != version {
		return fmt.Errorf("-release %q: want a semantic version such as v0.1.0 or v0.2.0-rc.1 (make: VERSION)", version)
	}
	o.release, o.tag, o.version = true, version, version
	if _, err := os.Stat(o.out); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("-out %q: the directory exists: remove it, or name another", o.out)
	}
	if keyFile != "" {
		if o.key, err = readKey(keyFile); err != nil {
			return fmt.Errorf("-key %q: %w: create a key with `openssl genpkey -algorithm ed25519 -out FILE` (make: KEY)",
				keyFile, err)
		}
	}
	ref, err := name.NewTag(o.registry + "/watershed:" + version)
	if err != nil || !registryName.MatchString(o.registry) {
		return fmt.Errorf("-registry %q: want HOST[:PORT][/PATH] without a scheme (make: REGISTRY)", o.registry)
	}
	if o.push && o.registry == project {
		return fmt.Errorf("-push with -registry %q: name your registry (make: REGISTRY)", o.registry)
	}
	if o.push && o.key == nil && !o.unsigned {
		return errors.New("-push without -key: add -key FILE, or -unsigned (make: KEY, UNSIGNED=1)")
	}
	if o.push {
		if err := remote.CheckPushPermission(ref, authn.DefaultKeychain, http.DefaultTransport); err != nil {
			return fmt.Errorf("-registry %q: %w: start the registry, log in, or omit -push (make: REGISTRY, PUSH)",
				o.registry, err)
		}
	}
	if changed := git("status", "--porcelain"); changed != "" || o.revision == "" {
		first, _, _ := strings.Cut(changed, "\n")
		return fmt.Errorf("-release %q: the work tree is not a commit (%q): commit or stash the changes", version, first)
	}
	return nil
}

// readKey reads an ed25519 key in a PEM file (PKCS #8), which only its owner may access.
func readKey(file string) (ed25519.PrivateKey, error) {
	info, err := os.Stat(file)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return nil, fmt.Errorf("the file's mode is %04o, want 0600", mode)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, errors.Unwrap(err)
	}
	block, _ := pem.Decode(text)
	if block == nil {
		return nil, errors.New("not a PEM file")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	ed, ok := key.(ed25519.PrivateKey)
	if !ok {
		return nil, fmt.Errorf("%T is not an ed25519 key", key)
	}
	return ed, nil
}

// runRelease builds all artefacts of a release, and pushes them if -push is set. The last files are SHA256SUMS, which
// names every other file, and its signature.
func (o *options) runRelease() error {
	work, err := os.MkdirTemp("", "release")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	images, err := o.images(work)
	if err != nil {
		return err
	}
	for _, p := range o.platforms {
		binary := "watershed-" + p.OS + "-" + p.Architecture
		if err := copyFile(filepath.Join(o.out, binary), filepath.Join(work, binary)); err != nil {
			return err
		}
	}
	// The work tree may have ignored files. Only files of the commit belong to a release.
	tree := filepath.Join(work, "tree") + "/"
	if out, err := exec.Command("git", "checkout-index", "--all", "--prefix="+tree).CombinedOutput(); err != nil {
		return fmt.Errorf("git checkout-index: %w: %s", err, out)
	}
	files, err := o.manifests(filepath.Join(tree, "deploy"), images)
	if err != nil {
		return err
	}
	if files["RELEASE_NOTES.md"], err = o.notes(); err != nil {
		return err
	}
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(o.out, name), data, 0o644); err != nil {
			return err
		}
	}
	if err := o.sign(); err != nil {
		return err
	}
	if !o.push {
		return nil
	}
	if err := o.pushAll(images, files[o.chart()]); err != nil {
		return fmt.Errorf("-registry %q: %w", o.registry, err)
	}
	return nil
}

// pushAll pushes the images and the chart. It pushes nothing if a tag has another digest.
func (o *options) pushAll(images []*image, chart []byte) error {
	artefact, err := chartImage(chart)
	if err != nil {
		return err
	}
	digest, err := artefact.Digest()
	if err != nil {
		return err
	}
	chartTag := o.registry + "/charts/watershed:" + strings.TrimPrefix(o.tag, "v")
	tags := map[string]v1.Hash{chartTag: digest}
	for _, i := range images {
		tags[o.registry+"/"+i.name+":"+o.tag] = i.digest
	}
	for _, tag := range slices.Sorted(maps.Keys(tags)) {
		if err := checkTag(tag, tags[tag]); err != nil {
			return err
		}
	}
	for _, i := range images {
		if err := o.pushImage(i); err != nil {
			return err
		}
	}
	ref, err := name.NewTag(chartTag)
	if err != nil {
		return err
	}
	if err := remote.Write(ref, artefact, remote.WithAuthFromKeychain(authn.DefaultKeychain)); err != nil {
		return err
	}
	fmt.Println("pushed", ref)
	return nil
}

// checkTag returns an error if a tag exists with another digest, because clients have pulled and pinned that digest.
func checkTag(tag string, want v1.Hash) error {
	ref, err := name.NewTag(tag)
	if err != nil {
		return err
	}
	found, err := remote.Head(ref, remote.WithAuthFromKeychain(authn.DefaultKeychain))
	var failed *transport.Error
	switch {
	case errors.As(err, &failed) && failed.StatusCode == http.StatusNotFound:
		return nil
	case err != nil:
		return err
	case found.Digest != want:
		return fmt.Errorf("%s exists with another digest (%s): release another version, or delete the tag", tag,
			found.Digest)
	}
	return nil
}

func copyFile(to, from string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	return os.WriteFile(to, data, 0o755)
}

// chart is the file name of the Helm chart. Helm requires it.
func (o *options) chart() string { return "watershed-" + strings.TrimPrefix(o.tag, "v") + ".tgz" }

// manifests returns the files for Kubernetes: the rendered overlays, a bundle of bases, components and overlays for
// kustomize, and the chart. It reads the directory deploy, and adds the digest of each image. images.txt lists the
// images.
func (o *options) manifests(deploy string, images []*image) (map[string][]byte, error) {
	files := map[string][]byte{}
	bundle, chart := map[string][]byte{}, map[string][]byte{}
	for _, dir := range []string{"k8s", "monitoring"} {
		tree, err := walk(filepath.Join(deploy, dir))
		if err != nil {
			return nil, err
		}
		for path, data := range tree {
			own, ofChart := strings.CutPrefix(path, "chart/")
			if ofChart {
				chart[own], err = pin(data, images, project, o.tag)
			} else {
				bundle[dir+"/"+path], err = pin(data, images, o.registry, o.tag)
			}
			if err != nil {
				return nil, fmt.Errorf("deploy/%s/%s: %w", dir, path, err)
			}
		}
	}
	for path, data := range bundle {
		if overlay, ok := strings.CutPrefix(path, "k8s/rendered/"); ok {
			files["watershed-"+o.tag+"-"+overlay] = data
		}
	}
	number := strings.TrimPrefix(o.tag, "v")
	for _, edit := range []struct{ file, key, value string }{
		{"Chart.yaml", "version", number},
		{"Chart.yaml", "appVersion", o.tag},
		{"values.yaml", "  registry", o.registry},
	} {
		line := regexp.MustCompile(`(?m)^` + edit.key + `: .*$`)
		if len(line.FindAll(chart[edit.file], -1)) != 1 {
			return nil, fmt.Errorf("deploy/k8s/chart/%s: want a single line %s", edit.file, edit.key)
		}
		chart[edit.file] = line.ReplaceAll(chart[edit.file], []byte(edit.key+": "+edit.value))
	}
	var list bytes.Buffer
	for _, i := range images {
		fmt.Fprintf(&list, "%s/%s:%s@%s\n", o.registry, i.name, o.tag, i.digest)
	}
	files["images.txt"] = list.Bytes()
	prefix := "watershed-" + o.tag + "-kustomize"
	for name, content := range map[string][]byte{
		o.chart():          pack("watershed/", chart),
		prefix + ".tar.gz": pack(prefix+"/", bundle),
	} {
		var zipped bytes.Buffer
		w := gzip.NewWriter(&zipped)
		_, _ = w.Write(content) // a buffer returns no error
		_ = w.Close()
		files[name] = zipped.Bytes()
	}
	return files, nil
}

var projectImage = regexp.MustCompile(regexp.QuoteMeta(project) + `/([a-z]+):[\w.-]+`)

// pin replaces the project's images in a manifest by images of a registry with their digests.
func pin(manifest []byte, images []*image, registry, tag string) (pinned []byte, err error) {
	pinned = projectImage.ReplaceAllFunc(manifest, func(m []byte) []byte {
		name := string(projectImage.FindSubmatch(m)[1])
		for _, i := range images {
			if i.name == name {
				return fmt.Appendf(nil, "%s/%s:%s@%s", registry, name, tag, i.digest)
			}
		}
		err = fmt.Errorf("the image %s is not built", name)
		return m
	})
	return pinned, err
}

// notes returns the section of the version in CHANGELOG.md. Without such a section it is the section Unreleased.
func (o *options) notes() ([]byte, error) {
	text, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		return nil, err
	}
	for _, title := range []string{o.tag, "Unreleased"} {
		// a date may follow
		at := regexp.MustCompile(`(?m)^## ` + regexp.QuoteMeta(title) + `( .*)?$`).FindIndex(text)
		if at == nil {
			continue
		}
		section, _, _ := strings.Cut(string(text[at[1]:]), "\n## ")
		if title != o.tag {
			fmt.Fprintf(os.Stderr, "images: CHANGELOG.md has no section %q: the notes are its section %q\n",
				o.tag, title)
		}
		return fmt.Appendf(nil, "# Watershed %s\n\nCommit %s.\n\n%s\n", o.tag, o.revision, strings.TrimSpace(section)), nil
	}
	return nil, fmt.Errorf("CHANGELOG.md: no section %q: add it", "## "+o.tag)
}

// sign writes SHA256SUMS with every file of the release, and its signature if there is a key.
func (o *options) sign() error {
	all, err := walk(o.out)
	if err != nil {
		return err
	}
	var sums bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(all)) {
		fmt.Fprintf(&sums, "%x  %s\n", sha256.Sum256(all[name]), name)
	}
	path := filepath.Join(o.out, "SHA256SUMS")
	if err := os.WriteFile(path, sums.Bytes(), 0o644); err != nil {
		return err
	}
	fmt.Printf("%d files in %s\n", len(all), path)
	if o.key == nil {
		fmt.Println("SHA256SUMS is not signed: -key FILE signs it (make: KEY)")
		return nil
	}
	signature, err := o.key.Sign(nil, sums.Bytes(), crypto.Hash(0))
	if err != nil {
		return err
	}
	return os.WriteFile(path+".sig", signature, 0o644)
}

// pushImage pushes an image, and the SBOMs that refer to it.
func (o *options) pushImage(i *image) error {
	tag, err := name.NewTag(o.registry + "/" + i.name + ":" + o.tag)
	if err != nil {
		return err
	}
	auth := remote.WithAuthFromKeychain(authn.DefaultKeychain)
	all, err := layout.ImageIndexFromPath(i.layout)
	if err != nil {
		return err
	}
	index, err := all.ImageIndex(i.digest)
	if err != nil {
		return err
	}
	if err := remote.WriteIndex(tag, index, auth); err != nil {
		return err
	}
	manifest, err := all.IndexManifest()
	if err != nil {
		return err
	}
	for _, d := range manifest.Manifests {
		if d.ArtifactType != spdx {
			continue
		}
		bill, err := all.Image(d.Digest)
		if err != nil {
			return err
		}
		if err := remote.Write(tag.Digest(d.Digest.String()), bill, auth); err != nil {
			return err
		}
	}
	fmt.Println("pushed", tag)
	return nil
}

// chartImage returns the chart as an artefact, as `helm push` does. Helm reads the layer only.
func chartImage(chart []byte) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1),
		"application/vnd.cncf.helm.config.v1+json")
	return mutate.AppendLayers(base, static.NewLayer(chart, "application/vnd.cncf.helm.chart.content.v1.tar+gzip"))
}
