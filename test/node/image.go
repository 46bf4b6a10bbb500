package node

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"strings"
)

// image is an image that the test builds, because a registry is not reachable from every machine.
type image struct {
	tags            []string
	entrypoint, cmd []string
	busybox         bool
	files           map[string][]byte // by path in the image
}

// archive returns the image in the format of `docker save`.
func (i *image) archive() ([]byte, error) {
	layer, err := i.layer()
	if err != nil {
		return nil, err
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(layer))
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64",
		"os":           "linux",
		"rootfs":       map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + sum}},
		"config": map[string]any{"Entrypoint": i.entrypoint, "Cmd": i.cmd,
			"Env": []string{"PATH=/bin:/usr/bin:/sbin:/usr/sbin"}, "WorkingDir": "/"},
		"history": []any{map[string]string{"created": "2026-01-01T00:00:00Z"}},
	})
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest, err := json.Marshal([]any{map[string]any{
		"Config":   name,
		"RepoTags": i.tags,
		"Layers":   []string{sum + "/layer.tar"},
	}})
	if err != nil {
		return nil, err
	}
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, f := range []struct {
		name string
		data []byte
	}{{name, config}, {sum + "/layer.tar", layer}, {"manifest.json", manifest}} {
		if err := add(w, f.name, f.data, 0o644); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}

func add(w *tar.Writer, name string, data []byte, mode int64) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(data)), Mode: mode}); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}

func (i *image) layer() ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	made := map[string]bool{}
	var dir func(name string) error
	dir = func(name string) error {
		if name == "." || made[name] {
			return nil
		}
		if err := dir(path.Dir(name)); err != nil {
			return err
		}
		made[name] = true
		mode := int64(0o755)
		if name == "tmp" {
			mode = 0o1777
		}
		return w.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode})
	}
	for _, d := range []string{"bin", "sbin", "usr/bin", "usr/sbin", "etc", "tmp", "var/run",
		"var/log", "home", "root"} {
		if err := dir(d); err != nil {
			return nil, err
		}
	}
	users := map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n" +
			"default-user:x:1000:1000::/home:/bin/sh\n",
		"etc/group": "root:x:0:\nnobody:x:65534:\ndefault-group:x:2000:\n",
	}
	for name, text := range users {
		if err := add(w, name, []byte(text), 0o644); err != nil {
			return nil, err
		}
	}
	if i.busybox {
		if err := addBusybox(w); err != nil {
			return nil, err
		}
	}
	for name, data := range i.files {
		name = strings.TrimPrefix(name, "/")
		if err := dir(path.Dir(name)); err != nil {
			return nil, err
		}
		if err := add(w, name, data, 0o755); err != nil {
			return nil, err
		}
	}
	return b.Bytes(), w.Close()
}

// addBusybox adds Debian's static busybox under all its names.
func addBusybox(w *tar.Writer) error {
	data, err := os.ReadFile("/bin/busybox")
	if err != nil {
		return err
	}
	if err := add(w, "bin/busybox", data, 0o755); err != nil {
		return err
	}
	names, err := exec.Command("/bin/busybox", "--list").Output()
	if err != nil {
		return err
	}
	for _, n := range strings.Fields(string(names)) {
		if n == "busybox" {
			continue
		}
		if err := w.WriteHeader(&tar.Header{
			Name:     "bin/" + n,
			Typeflag: tar.TypeSymlink,
			Linkname: "/bin/busybox",
			Mode:     0o777,
		}); err != nil {
			return err
		}
	}
	return nil
}
