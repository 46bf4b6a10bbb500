package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// edit replaces the text from the first line that begins with from, up to but without the line that begins with to.
type edit struct{ from, to, text string }

// edits are the changes to the files that start a server, by module and path. Other parts of the files stay upstream's:
// options, certificates, waiting and teardown.
var edits = map[string][]edit{
	"k8s.io/kubernetes/cmd/kube-apiserver/app/testing/testserver.go": {
		{
			from: "	\"k8s.io/kubernetes/cmd/kube-apiserver/app\"\n",
			to:   "	\"k8s.io/kubernetes/cmd/kube-apiserver/app/options\"\n",
			text: "	\"watershed.dev/test/integration/server\"\n",
		},
		{
			from: "	\"k8s.io/kube-aggregator/pkg/apiserver\"\n",
			to:   "	testutil \"k8s.io/kubernetes/test/utils\"\n",
			text: "	\"k8s.io/kube-aggregator/pkg/apiserver\"\n",
		},
		{
			from: "	config, err := app.NewConfig(completedOptions)\n",
			to:   "	if !instanceOptions.SkipHealthzCheck {\n",
			text: `	if instanceOptions.StorageVersionWrapFunc != nil {
		server.Skip(t, "the test replaces the storage version manager")
	}
	watershed, err := server.Start(tCtx, t, result.TmpDir, s)
	if err != nil {
		return result, err
	}
	errCh = watershed.Ended
	client, err := kubernetes.NewForConfig(watershed.Client)
	if err != nil {
		return result, fmt.Errorf("failed to create a client: %v", err)
	}

`,
		},
		{
			from: "	result.ClientConfig = restclient.CopyConfig(server.GenericAPIServer.LoopbackClientConfig)\n",
			to:   "	result.ClientConfig.QPS = 1000\n",
			text: "	result.ClientConfig = restclient.CopyConfig(watershed.Client)\n",
		},
	},
	"k8s.io/kubernetes/test/integration/framework/test_server.go": {
		{
			from: "	apiextensionsapiserver \"k8s.io/apiextensions-apiserver/pkg/apiserver\"\n",
			to:   "	metav1 \"k8s.io/apimachinery/pkg/apis/meta/v1\"\n",
		},
		{
			from: "	\"k8s.io/apimachinery/pkg/runtime\"\n",
			to:   "	utilerrors \"k8s.io/apimachinery/pkg/util/errors\"\n",
		},
		{
			from: "	genericapiserver \"k8s.io/apiserver/pkg/server\"\n",
			to:   "	genericapiserveroptions \"k8s.io/apiserver/pkg/server/options\"\n",
		},
		{
			from: "	aggregatorscheme \"k8s.io/kube-aggregator/pkg/apiserver/scheme\"\n",
			to:   "	netutils \"k8s.io/utils/net\"\n",
		},
		{
			from: "	\"k8s.io/kubernetes/cmd/kube-apiserver/app\"\n",
			to:   "	\"k8s.io/kubernetes/cmd/kube-apiserver/app/options\"\n",
		},
		{
			from: "	\"k8s.io/kubernetes/pkg/api/legacyscheme\"\n",
			to:   "	\"k8s.io/kubernetes/pkg/controlplane\"\n",
		},
		{
			from: "	controlplaneapiserver \"k8s.io/kubernetes/pkg/controlplane/apiserver\"\n",
			to:   "	\"k8s.io/kubernetes/test/utils\"\n",
		},
		{
			from: "	\"k8s.io/kubernetes/test/utils\"\n",
			to:   ")\n",
			text: "	\"k8s.io/kubernetes/test/utils\"\n	\"watershed.dev/test/integration/server\"\n",
		},
		{
			from: "	genericConfig, versionedInformers, storageFactory, err := ",
			to:   "	// wait for health\n",
			text: `	var bridges *server.Bridges
	if setup.ModifyServerConfig != nil {
		proxy := server.FrontProxy{CA: proxySigningCert, Key: proxySigningKey}
		bridges, err = server.Modify(t, opts, completedOptions.ServiceAccountIssuer, proxy, setup.ModifyServerConfig)
		if err != nil {
			t.Fatal(err)
		}
	}
	watershed, err := server.StartModified(ctx, t, certDir, opts, bridges)
	if err != nil {
		t.Fatal(err)
	}
	errCh = watershed.Ended
	kubeAPIServerClientConfig := rest.CopyConfig(watershed.Client)
	kubeAPIServerClientConfig.CAFile = path.Join(certDir, "apiserver.crt")
	kubeAPIServerClientConfig.CAData = nil

`,
		},
	},
	// The check for goroutines of the server in the process retries for ten minutes.
	"k8s.io/kubernetes/test/integration/framework/goleak.go": {
		{
			from: "	timeout := 600 * time.Second\n",
			to:   "	start := time.Now()\n",
			text: "	timeout := 5 * time.Second\n",
		},
	},
	"k8s.io/kubernetes/test/integration/etcd/server.go": {
		{
			from: "	\"k8s.io/kubernetes/cmd/kube-apiserver/app\"\n",
			to:   "	\"k8s.io/kubernetes/cmd/kube-apiserver/app/options\"\n",
			text: "	\"watershed.dev/test/integration/server\"\n",
		},
		{
			from: "	config, err := app.NewConfig(completedOptions)\n",
			to:   "	// we make lots of requests, don't be slow\n",
			text: `	watershed, err := server.Start(tCtx, t, certDir, opts)
	if err != nil {
		t.Fatal(err)
	}
	kubeClientConfig := restclient.CopyConfig(watershed.Client)

`,
		},
		{
			from: "	errCh := make(chan error)\n",
			to:   "	lastHealth := \"\"\n",
			text: "	errCh := watershed.Ended\n\n",
		},
	},
	"k8s.io/apiextensions-apiserver/pkg/cmd/server/testing/testserver.go": {
		{
			from: "	\"k8s.io/klog/v2\"\n",
			to:   ")\n",
			text: "	\"k8s.io/klog/v2\"\n	\"watershed.dev/test/integration/server\"\n",
		},
		{
			from: "	server, err := completedConfig.New(",
			to:   "	t.Logf(\"Waiting for /healthz to be ok...\")\n",
			text: `	watershed, err := server.StartExtensions(ctx, t, result.TmpDir, s)
	if err != nil {
		return result, err
	}
	errCh = watershed.Ended

`,
		},
		{
			from: "	client, err := kubernetes.NewForConfig(server.GenericAPIServer.LoopbackClientConfig)\n",
			to:   "	if err != nil {\n",
			text: "	client, err := kubernetes.NewForConfig(watershed.Client)\n",
		},
		{
			from: "	result.ClientConfig = server.GenericAPIServer.LoopbackClientConfig\n",
			to:   "	result.ServerOpts = s\n",
			text: "	result.ClientConfig = watershed.Client\n",
		},
	},
}

// modules are the modules that the edits change.
var modules = []string{"k8s.io/kubernetes", "k8s.io/apiextensions-apiserver"}

// workspace writes a go.work, the edited files, and their list for `go test -overlay` into dir. The go command refuses
// to replace files in the module cache, so the workspace replaces the modules with directories of links. The directory
// of kubernetes also has the staging directory of k8s.io/api, whose test data the tests of etcd read.
func workspace(root, dir string) (work, overlay string, err error) {
	text, err := os.ReadFile(filepath.Join(root, "go.work"))
	if err != nil {
		return "", "", err
	}
	sums, err := os.ReadFile(filepath.Join(root, "go.work.sum"))
	if err != nil {
		return "", "", err
	}
	text = bytes.ReplaceAll(text, []byte("\t./"), []byte("\t"+root+"/"))
	replaced := map[string]string{}
	for _, module := range modules {
		source, err := output("go", "list", "-m", "-f", "{{.Dir}}", module)
		if err != nil {
			return "", "", err
		}
		link := filepath.Join(dir, filepath.Base(module))
		if err := os.RemoveAll(link); err != nil {
			return "", "", err
		}
		if err := linkTree(source, link, "test", "test/integration", "test/integration/etcd", "staging"); err != nil {
			return "", "", err
		}
		text = fmt.Appendf(text, "\nreplace %s => %s\n", module, link)
		for name, list := range edits {
			if path, ok := strings.CutPrefix(name, module+"/"); ok {
				edited := filepath.Join(dir, strings.ReplaceAll(name, "/", "-"))
				if err := editFile(filepath.Join(source, path), edited, list); err != nil {
					return "", "", err
				}
				replaced[filepath.Join(link, path)] = edited
			}
		}
	}
	api, err := output("go", "list", "-m", "-f", "{{.Dir}}", "k8s.io/api")
	if err != nil {
		return "", "", err
	}
	staging := filepath.Join(dir, "kubernetes", "staging", "src", "k8s.io")
	if err := os.MkdirAll(staging, 0o755); err != nil {
		return "", "", err
	}
	if err := os.Symlink(api, filepath.Join(staging, "api")); err != nil {
		return "", "", err
	}
	list, err := json.Marshal(map[string]any{"Replace": replaced})
	if err != nil {
		return "", "", err
	}
	work, overlay = filepath.Join(dir, "go.work"), filepath.Join(dir, "overlay.json")
	for path, content := range map[string][]byte{work: text, work + ".sum": sums, overlay: list} {
		if err := os.WriteFile(path, content, 0o600); err != nil {
			return "", "", err
		}
	}
	return work, overlay, nil
}

// linkTree makes a directory with links to the entries of source. The directories dirs become directories with links.
func linkTree(source, link string, dirs ...string) error {
	if err := os.Mkdir(link, 0o755); err != nil {
		return err
	}
	entries, err := os.ReadDir(source)
	if err != nil {
		return err
	}
	for _, e := range entries {
		from, to := filepath.Join(source, e.Name()), filepath.Join(link, e.Name())
		if slices.Contains(dirs, e.Name()) {
			var below []string
			for _, d := range dirs {
				if rest, ok := strings.CutPrefix(d, e.Name()+"/"); ok {
					below = append(below, rest)
				}
			}
			err = linkTree(from, to, below...)
		} else {
			err = os.Symlink(from, to)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func editFile(from, to string, list []edit) error {
	text, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	for _, e := range list {
		if text, err = e.apply(text); err != nil {
			return fmt.Errorf("%s: %w", from, err)
		}
	}
	return os.WriteFile(to, text, 0o600)
}

func (e edit) apply(text []byte) ([]byte, error) {
	if n := bytes.Count(text, []byte("\n"+e.from)); n != 1 {
		return nil, fmt.Errorf("%q occurs %d times", e.from, n)
	}
	from := bytes.Index(text, []byte("\n"+e.from)) + 1
	length := bytes.Index(text[from:], []byte("\n"+e.to)) + 1
	if length == 0 {
		return nil, fmt.Errorf("no %q after %q", e.to, e.from)
	}
	return bytes.Join([][]byte{text[:from], []byte(e.text), text[from+length:]}, nil), nil
}
