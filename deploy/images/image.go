package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// image builds one image, and loads it if -load is set.
func (o *options) image(name, work string) error {
	binary := filepath.Join(work, name)
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w "+o.ldflags, "-o", binary, packages[name])
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	build.Stderr = os.Stderr
	if err := build.Run(); err != nil {
		return err
	}
	sbom, err := billOfMaterials(name, o.release, binary, o.created)
	if err != nil {
		return err
	}
	image, err := o.assemble(name, binary)
	if err != nil {
		return err
	}
	full := o.registry + "/" + name + ":" + o.tag
	file := filepath.Join(o.out, name+".tar")
	if err := write(file, filepath.Join(work, name+".layout"), full, image, sbom); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(o.out, name+".spdx.json"), sbom, 0o644); err != nil {
		return err
	}
	digest, err := image.Digest()
	if err != nil {
		return err
	}
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	fmt.Printf("%-40s %6.1f MB  %s\n", full, float64(info.Size())/1e6, digest)
	return o.loadInto(file)
}

// assemble returns an image with one file, and with the links to it.
func (o *options) assemble(name, binary string) (v1.Image, error) {
	content, err := os.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	var files bytes.Buffer
	w := tar.NewWriter(&files)
	header := &tar.Header{
		Name:    name,
		Mode:    0o555,
		Size:    int64(len(content)),
		ModTime: time.Unix(0, 0),
		Format:  tar.FormatPAX,
	}
	if err := w.WriteHeader(header); err != nil {
		return nil, err
	}
	if _, err := w.Write(content); err != nil {
		return nil, err
	}
	for _, link := range links[name] {
		link := &tar.Header{Typeflag: tar.TypeSymlink, Name: link, Linkname: "/" + name, Mode: 0o777,
			ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
		if err := w.WriteHeader(link); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	open := func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(files.Bytes())), nil }
	layer, err := tarball.LayerFromOpener(open, tarball.WithMediaType(types.OCILayer),
		tarball.WithCompressionLevel(gzip.BestSpeed), tarball.WithCompressedCaching)
	if err != nil {
		return nil, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.AppendLayers(base, layer)
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.Architecture, config.OS = goEnv("GOARCH"), goEnv("GOOS")
	config.Created = v1.Time{Time: o.created}
	config.Config = v1.Config{
		User:       user,
		Entrypoint: []string{"/" + name},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":    "watershed " + name,
			"org.opencontainers.image.version":  o.release,
			"org.opencontainers.image.revision": o.revision,
			"org.opencontainers.image.created":  o.created.Format(time.RFC3339),
			"org.opencontainers.image.licenses": "Apache-2.0",
		},
	}
	return mutate.ConfigFile(image, config)
}

// links are the links to the file of an image. kubeadm's manifest runs kube-apiserver by its name.
var links = map[string][]string{"watershed": {"usr/local/bin/kube-apiserver"}}

func goEnv(name string) string {
	out, err := exec.Command("go", "env", name).Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

// write writes a tar file of an OCI layout with the image and its SBOM, which refers to the image. containerd reads the
// image's name from an annotation of its descriptor, docker from its own manifest (docker save, format of 25.0).
func write(file, dir, name string, image v1.Image, sbom []byte) error {
	l, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	if err := l.AppendImage(image, layout.WithAnnotations(map[string]string{
		"io.containerd.image.name":          name,
		"org.opencontainers.image.ref.name": name,
	})); err != nil {
		return err
	}
	bill, err := referrer(image, sbom)
	if err != nil {
		return err
	}
	if err := l.WriteImage(bill); err != nil {
		return err
	}
	digest, err := bill.Digest()
	if err != nil {
		return err
	}
	size, err := bill.Size()
	if err != nil {
		return err
	}
	if err := l.AppendDescriptor(v1.Descriptor{
		MediaType:    types.OCIManifestSchema1,
		Digest:       digest,
		Size:         size,
		ArtifactType: spdx,
	}); err != nil {
		return err
	}
	if err := dockerManifest(dir, name, image); err != nil {
		return err
	}
	return pack(file, dir)
}

// spdx is the media type of the SBOM.
const spdx = "application/spdx+json"

// referrer returns the SBOM as an artifact that refers to the image (OCI image spec 1.1, subject).
func referrer(image v1.Image, sbom []byte) (v1.Image, error) {
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), spdx)
	bill, err := mutate.AppendLayers(base, static.NewLayer(sbom, spdx))
	if err != nil {
		return nil, err
	}
	digest, err := image.Digest()
	if err != nil {
		return nil, err
	}
	size, err := image.Size()
	if err != nil {
		return nil, err
	}
	subject, ok := mutate.Subject(bill, v1.Descriptor{
		MediaType: types.OCIManifestSchema1,
		Digest:    digest,
		Size:      size,
	}).(v1.Image)
	if !ok {
		return nil, errors.New("adding a subject did not return an image")
	}
	return subject, nil
}

// dockerManifest adds the manifest that docker load reads to the layout.
func dockerManifest(dir, name string, image v1.Image) error {
	config, err := image.ConfigName()
	if err != nil {
		return err
	}
	layers, err := image.Layers()
	if err != nil {
		return err
	}
	blob := func(h v1.Hash) string { return "blobs/" + h.Algorithm + "/" + h.Hex }
	manifest := tarball.Descriptor{Config: blob(config), RepoTags: []string{name}}
	for _, l := range layers {
		d, err := l.Digest()
		if err != nil {
			return err
		}
		manifest.Layers = append(manifest.Layers, blob(d))
	}
	data, err := json.Marshal(tarball.Manifest{manifest})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "manifest.json"), data, 0o644)
}

// pack writes the files of a directory to a tar file, in order and without times.
func pack(file, dir string) error {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	err := filepath.WalkDir(dir, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		header := &tar.Header{
			Name:    filepath.ToSlash(name),
			Mode:    0o644,
			Size:    int64(len(data)),
			ModTime: time.Unix(0, 0),
		}
		if err := w.WriteHeader(header); err != nil {
			return err
		}
		_, err = w.Write(data)
		return err
	})
	if err = errors.Join(err, w.Close()); err != nil {
		return err
	}
	return os.WriteFile(file, buf.Bytes(), 0o644)
}

// billOfMaterials returns the SBOM of a binary (SPDX 2.3), from the build information in the binary.
func billOfMaterials(name, release, binary string, created time.Time) ([]byte, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, err
	}
	type reference struct {
		Category string `json:"referenceCategory"`
		Type     string `json:"referenceType"`
		Locator  string `json:"referenceLocator"`
	}
	type module struct {
		ID       string      `json:"SPDXID"`
		Name     string      `json:"name"`
		Version  string      `json:"versionInfo,omitempty"`
		Location string      `json:"downloadLocation"`
		Refs     []reference `json:"externalRefs,omitempty"`
	}
	type relation struct {
		From string `json:"spdxElementId"`
		Type string `json:"relationshipType"`
		To   string `json:"relatedSpdxElement"`
	}
	const document, root = "SPDXRef-DOCUMENT", "SPDXRef-watershed"
	modules := []module{{ID: root, Name: "watershed-" + name, Version: release, Location: "NOASSERTION"}}
	relations := []relation{{document, "DESCRIBES", root}}
	add := func(path, version, purl string) {
		id := fmt.Sprintf("SPDXRef-module-%d", len(modules))
		modules = append(modules, module{
			ID:       id,
			Name:     path,
			Version:  version,
			Location: "NOASSERTION",
			Refs:     []reference{{"PACKAGE-MANAGER", "purl", purl}},
		})
		relations = append(relations, relation{root, "DEPENDS_ON", id})
	}
	add("stdlib", info.GoVersion, "pkg:golang/stdlib@"+strings.TrimPrefix(info.GoVersion, "go"))
	for _, d := range info.Deps {
		if d.Replace != nil && d.Replace.Version != "" {
			d = d.Replace
		}
		if !strings.HasPrefix(d.Path, "watershed.dev/") {
			add(d.Path, d.Version, "pkg:golang/"+d.Path+"@"+d.Version)
		}
	}
	return json.MarshalIndent(map[string]any{
		"spdxVersion":       "SPDX-2.3",
		"dataLicense":       "CC0-1.0",
		"SPDXID":            document,
		"name":              "watershed-" + name,
		"documentNamespace": "https://watershed.dev/sbom/" + name + "/" + release,
		"creationInfo": map[string]any{
			"created":  created.Format(time.RFC3339),
			"creators": []string{"Tool: watershed-images"},
		},
		"packages":      modules,
		"relationships": relations,
	}, "", "  ")
}
