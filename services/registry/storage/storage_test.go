package storage_test

import (
	"os"
	"os/exec"
	"strings"
	"testing"

	"watershed.dev/platform/egress"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/storage"
)

// ByKey finds the resource of a key at any depth of prefix.
func TestByKey(t *testing.T) {
	s := fixture.New(t).Resources.Storage
	for key, want := range map[string]string{
		"/registry/pods/default/a":                         "pods",
		"/registry/services/specs/default/kubernetes":      "services",
		"/registry/services/endpoints/default/kubernetes":  "endpoints",
		"/registry/minions/node-1":                         "nodes",
		"/registry/deployments/x/web":                      "deployments.apps",
		"/registry/events/x/e":                             "events",
		"/registry/apiregistration.k8s.io/apiservices/v1.": "apiservices.apiregistration.k8s.io",
		"/registry/ranges/serviceips":                      "",
		"/registry/example.com/things/x/a":                 "",
		"/elsewhere/pods/default/a":                        "",
	} {
		got := ""
		if st, ok := s.ByKey(key); ok {
			got = st.Name()
		}
		if got != want {
			t.Errorf("%s is of %q, not %q", key, got, want)
		}
	}
	for _, name := range []string{"pods", "deployments.apps", "events", "leases.coordination.k8s.io"} {
		if st, ok := s.ByName(name); !ok || st.Name() != name || !strings.HasPrefix(st.Prefix, s.Prefix()) {
			t.Errorf("%s: %v", name, ok)
		}
	}
}

// An object is below the prefix, as upstream's storage writes it, for each form of the prefix.
func TestPrefix(t *testing.T) {
	for prefix, below := range map[string]string{"/": "/", "": "/", "a/b/": "/a/b/"} {
		want := below + "configmaps/x/a"
		fx := fixture.New(t, "--etcd-prefix="+prefix)
		if _, err := fx.Write(t.Context(), fixture.ConfigMaps, &registryv1.WriteRequest{
			Verb: "create",
			Body: []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`),
		}, &fixture.Callbacks{}); err != nil {
			t.Fatal(err)
		}
		s := fx.Resources.Storage
		st, ok := s.ByKey(want)
		resp, err := s.Client.Client.Get(t.Context(), want)
		if err != nil || resp.Count != 1 || !ok || st.Key("x", "a") != want || !strings.HasPrefix(want, s.Prefix()) {
			t.Errorf("--etcd-prefix=%s: %s: %v, %+v, %v", prefix, want, ok, resp, err)
		}
	}
}

// A row holds an object in both encodings, or the error if it cannot be decoded.
func TestRow(t *testing.T) {
	fx := fixture.New(t)
	if _, err := fx.Write(t.Context(), fixture.ConfigMaps, &registryv1.WriteRequest{
		Verb: "create",
		Body: []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a","labels":{"l":"1"}}}`),
	}, &fixture.Callbacks{}); err != nil {
		t.Fatal(err)
	}
	st, _ := fx.Resources.Storage.ByName("configmaps")
	const key = "/registry/configmaps/x/a"
	resp, err := fx.Resources.Storage.Client.Client.Get(t.Context(), key)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatal(err, resp.Count)
	}
	value := resp.Kvs[0].Value
	row := st.Row(t.Context(), key, value, 7)
	if row.Unreadable != "" || row.Name != "a" || row.Namespace != "x" || row.Revision != 7 || row.Labels["l"] != "1" ||
		row.Fields["metadata.name"] != "a" {
		t.Errorf("%v", row)
	}
	if !strings.Contains(string(row.Json), `"resourceVersion":"7"`) || strings.Contains(string(row.Json), `"kind"`) {
		t.Errorf("%s", row.Json)
	}
	for name, value := range map[string]string{
		"rubbish":          "rubbish",
		"half":             string(value[:len(value)/2]),
		"another kind":     `{"apiVersion":"v1","kind":"Secret","metadata":{"name":"a"}}`,
		"no known version": `{"apiVersion":"v9","kind":"ConfigMap","metadata":{"name":"a"}}`,
	} {
		if row := st.Row(t.Context(), key, []byte(value), 7); row.Unreadable == "" {
			t.Errorf("%s is read as %.100s", name, row.Json)
		}
	}
}

// Upstream's clients of a main cluster dial through members, unless gRPC must use a proxy for a server of another etcd.
// net/http reads the proxy of the environment once, so a process of its own has it.
func TestUpstreamsClientsUseTheProxy(t *testing.T) {
	const child = "WATERSHED_TEST_PROXY"
	if os.Getenv(child) == "" {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), child+"=1", "HTTPS_PROXY=http://127.0.0.1:1", "NO_PROXY=10.0.0.1")
		if output, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v: %s", err, output)
		}
		return
	}
	for overrides, want := range map[string]bool{
		"/events#http://10.0.0.1:1": true,
		"/events#http://10.0.0.2:1": false,
	} {
		s, err := storage.Open(t.Context(), storage.Options{
			Servers:   []string{"http://127.0.0.1:1", "http://localhost:1"},
			Overrides: []string{overrides},
		}, egress.Selector{}, nil, "test")
		if err != nil {
			t.Fatal(err)
		}
		if got := s.Options.StorageConfig.Transport.EgressLookup != nil; got != want {
			t.Errorf("%s: upstream's clients dial through members: %v", overrides, got)
		}
		_ = s.Close()
	}
}

func TestBadSettingsNameTheirFlag(t *testing.T) {
	for flag, o := range map[string]storage.Options{
		"--etcd-servers":               {},
		"--encryption-provider-config": {Servers: []string{"http://localhost:1"}, EncryptionProviderConfig: "/none"},
		"--encryption-provider-config-automatic-reload": {
			Servers:                   []string{"http://localhost:1"},
			EncryptionAutomaticReload: true,
		},
		"--etcd-certfile": {Servers: []string{"https://localhost:1"}, CertFile: "/none", KeyFile: "/none"},
	} {
		if _, err := storage.Open(t.Context(), o, egress.Selector{}, nil, "test"); err == nil ||
			!strings.Contains(err.Error(), flag) {
			t.Errorf("%s: %v", flag, err)
		}
	}
}
