package node

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

// images returns pause, the test's own images, and the upstream suite's images.
func images(t testing.TB, o Options) []*image {
	t.Helper()
	file := func(path string) []byte {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	all := []*image{{
		tags: []string{
			"registry.k8s.io/pause:3.10",
			"registry.k8s.io/pause:3.10.1",
			"registry.k8s.io/pause:3.10.2",
		},
		entrypoint: []string{"/pause"},
		files:      map[string][]byte{"/pause": file(harness.Peer("pause"))},
	}}
	for name, path := range o.Programs {
		all = append(all, &image{
			tags:       []string{name},
			entrypoint: []string{"/" + filepath.Base(path)},
			files:      map[string][]byte{"/" + filepath.Base(path): file(path)},
		})
	}
	if o.Lean {
		return all
	}
	return append(all, suite(t)...)
}

// suite returns the upstream suite's images: its own agnhost, and busybox in place of other servers.
func suite(t testing.TB) []*image {
	t.Helper()
	file := func(path string) []byte {
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	const suite = "registry.k8s.io/e2e-test-images/"
	certificates := filepath.Join(module(t, "k8s.io/kubernetes"), "test", "images", "agnhost", "porter")
	return []*image{
		{
			tags:       []string{suite + "agnhost:2.63.0", suite + "agnhost:2.55"},
			entrypoint: []string{"/agnhost"},
			cmd:        []string{"pause"},
			busybox:    true,
			files: map[string][]byte{"/agnhost": file(harness.Peer("agnhost")),
				"/localhost.crt": file(certificates + "/localhost.crt"),
				"/localhost.key": file(certificates + "/localhost.key")},
		},
		{tags: []string{suite + "busybox:1.37.0-1", suite + "nonroot:1.5"}, cmd: []string{"sh"}, busybox: true},
		{
			tags: []string{suite + "httpd:2.4.38-4", suite + "httpd:2.4.39-4", suite + "nginx:1.14-4",
				suite + "nginx:1.15-4", suite + "nginx:1.27-0", suite + "nautilus:1.8", suite + "kitten:1.8"},
			entrypoint: []string{"/bin/busybox", "httpd", "-f", "-p", "80", "-h", "/usr/local/apache2/htdocs"},

			busybox: true,
			files: map[string][]byte{
				"/usr/local/apache2/htdocs/index.html": []byte("<html><body><h1>It works!</h1></body></html>\n"),
			},
		},
		{
			tags:       []string{suite + "sample-apiserver:1.29.2"},
			entrypoint: []string{"/kube-sample-apiserver"},
			files:      map[string][]byte{"/kube-sample-apiserver": file(harness.Peer("sample-apiserver"))},
		},
		{
			tags:       []string{"registry.k8s.io/etcd:3.6.8-0"},
			entrypoint: []string{"/usr/local/bin/etcd"},
			busybox:    true,
			files:      map[string][]byte{"/usr/local/bin/etcd": file(harness.Peer("etcd"))},
		},
		{
			tags:       []string{suite + "resource-consumer:1.14"},
			entrypoint: []string{"/consumer"},
			busybox:    true,
			files:      map[string][]byte{"/consumer": file(harness.Peer("resource-consumer"))},
		},
	}
}

func module(t testing.TB, name string) string {
	t.Helper()
	out, err := exec.Command("go", "list", "-C", filepath.Join(harness.Root(), "test"), "-m",
		"-f", "{{.Dir}}", name).Output()
	if err != nil {
		t.Fatalf("where is %s: %v", name, err)
	}
	return strings.TrimSpace(string(out))
}
