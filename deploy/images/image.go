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
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

// image is a built image of all platforms.
type image struct {
	name   string
	digest v1.Hash
	layout string
}

// image builds an image of all platforms, and loads it if -load is set.
func (o *options) image(name, work string) (*image, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	var images, bills []v1.Image
	for _, p := range o.platforms {
		variant := name + "-" + p.OS + "-" + p.Architecture
		binary := filepath.Join(work, variant)
		// GOFLAGS may have -buildvcs=false, and the binary must have the commit
		build := exec.Command("go", "build", "-trimpath", "-buildvcs=auto", "-ldflags", "-s -w "+o.ldflags, "-o", binary,
			packages[name])
		build.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS="+p.OS, "GOARCH="+p.Architecture)
		build.Stderr = os.Stderr
		if err := build.Run(); err != nil {
			return nil, err
		}
		sbom, err := billOfMaterials(variant, o.version, binary, o.created)
		if err != nil {
			return nil, err
		}
		if err := os.WriteFile(filepath.Join(o.out, variant+".spdx.json"), sbom, 0o644); err != nil {
			return nil, err
		}
		assembled, err := o.assemble(name, binary, p)
		if err != nil {
			return nil, err
		}
		bill, err := referrer(assembled, sbom)
		if err != nil {
			return nil, err
		}
		images, bills = append(images, assembled), append(bills, bill)
		index = mutate.AppendManifests(index,
			mutate.IndexAddendum{Add: assembled, Descriptor: v1.Descriptor{Platform: &p}})
	}
	digest, err := index.Digest()
	if err != nil {
		return nil, err
	}
	repository := o.registry + "/" + name
	full := repository + ":" + o.tag
	dir := filepath.Join(work, name+".layout")
	if err := write(dir, []string{full, repository + "@" + digest.String()}, index, images[0], bills); err != nil {
		return nil, err
	}
	files, err := walk(dir)
	if err != nil {
		return nil, err
	}
	content := pack("", files)
	file := filepath.Join(o.out, name+".tar")
	if err := os.WriteFile(file, content, 0o644); err != nil {
		return nil, err
	}
	fmt.Printf("%-40s %6.1f MB  %s\n", full, float64(len(content))/1e6, digest)
	return &image{name, digest, dir}, o.loadInto(file)
}

// assemble returns an image of a platform with one file, and with the links to it.
func (o *options) assemble(name, binary string, platform v1.Platform) (v1.Image, error) {
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
	config.Architecture, config.OS = platform.Architecture, platform.OS
	config.Created = v1.Time{Time: o.created}
	config.Config = v1.Config{
		User:       user,
		Entrypoint: []string{"/" + name},
		WorkingDir: "/",
		Labels: map[string]string{
			"org.opencontainers.image.title":    "watershed " + name,
			"org.opencontainers.image.version":  o.version,
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

// write writes an OCI layout with an image and its SBOMs, which refer to it. containerd reads a name of the image from
// an annotation of each descriptor. A kubelet without a registry needs the name with the digest. docker reads its own
// manifest (docker save, format of 25.0), which has the first name and the first platform.
func write(dir string, names []string, index v1.ImageIndex, first v1.Image, bills []v1.Image) error {
	l, err := layout.Write(dir, empty.Index)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := l.AppendIndex(index, layout.WithAnnotations(map[string]string{
			"io.containerd.image.name":          name,
			"org.opencontainers.image.ref.name": name,
		})); err != nil {
			return err
		}
	}
	for _, bill := range bills {
		if err := l.AppendImage(bill); err != nil {
			return err
		}
	}
	return dockerManifest(dir, names[0], first)
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

// walk returns the content of the files of a directory by their paths. It follows symbolic links.
func walk(dir string) (map[string][]byte, error) {
	files := map[string][]byte{}
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		path := filepath.Join(dir, e.Name())
		info, statErr := os.Stat(path)
		if statErr != nil {
			return nil, statErr
		}
		if info.IsDir() {
			below, err := walk(path)
			if err != nil {
				return nil, err
			}
			for name, data := range below {
				files[e.Name()+"/"+name] = data
			}
			continue
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		files[e.Name()] = data
	}
	return files, err
}

// pack returns a tar file of files below a prefix, in order and without times.
func pack(prefix string, files map[string][]byte) []byte {
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		data := files[name]
		header := &tar.Header{Name: prefix + name, Mode: 0o644, Size: int64(len(data)), ModTime: time.Unix(0, 0)}
		_ = w.WriteHeader(header) // a buffer returns no error
		_, _ = w.Write(data)
	}
	_ = w.Close()
	return buf.Bytes()
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
		Analyzed bool        `json:"filesAnalyzed"`
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
