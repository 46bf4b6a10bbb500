package storage_test

import (
	"fmt"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/eventlog"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/storage"
)

// --etcd-servers-overrides has kube-apiserver's format. Resources of access decisions are refused.
func TestValidateOverrides(t *testing.T) {
	for override, want := range map[string]string{
		"/events#http://a:1":            "",
		"/events#http://a:1;http://b:1": "",
		"apps/*#http://a:1":             "",
		"/events":                       "must be of format",
		"events#http://a:1":             "must be of format",
		"/events#":                      "must be of format",
		"/events#http://a:1;":           "must be of format",
		"/namespaces#http://a:1":        `"/namespaces": the main etcd must have namespaces`,
		"/*#http://a:1":                 "the main etcd must have *",
		"rbac.authorization.k8s.io/roles#http://a:1":     "the main etcd must have roles.rbac.authorization.k8s.io",
		"storage.k8s.io/volumeattachments#http://a:1":    "the main etcd must have volumeattachments",
		"storage.k8s.io/storageclasses#http://a:1":       "",
		"admissionregistration.k8s.io/*#https://a:1/etc": "the main etcd must have *",
	} {
		o := storage.Options{Servers: []string{"http://main:1"}, Overrides: []string{override}}
		err := o.Validate()
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "--etcd-servers-overrides")) {
			t.Errorf("%s: %v", override, err)
		}
	}
	var many []string
	for _, server := range strings.Split("abcdefgh", "") {
		many = append(many, "/events#http://"+server+":1")
	}
	err := (&storage.Options{Overrides: many}).Validate()
	if err == nil || !strings.Contains(err.Error(), "limit is 7") {
		t.Errorf("8 etcds: %v", err)
	}
}

// --etcd-servers has URLs that etcd's client can dial.
func TestValidateServers(t *testing.T) {
	for server, valid := range map[string]bool{
		"http://127.0.0.1:2379": true, "https://etcd-0.etcd:2379": true, "127.0.0.1:2379": true, "[::1]:2379": true,
		"unix:///run/etcd.sock": true, "unix://localhost:2379": true, "https://etcd": true,
		":::bad": false, "ftp://etcd": false, "": false, " ": false, "etcd": false, "http://": false, "http//etcd:1": false,
	} {
		err := (&storage.Options{Servers: []string{server}}).Validate()
		named := err != nil && strings.HasPrefix(err.Error(), fmt.Sprintf("--etcd-servers %q: ", server))
		if valid != (err == nil) || !valid && !named {
			t.Errorf("%q: %v", server, err)
		}
	}
}

// A resource with an override is in its etcd under kube-apiserver's key, and has the revisions of that etcd. Other
// resources stay in the main etcd.
func TestOverriddenResource(t *testing.T) {
	other := fixture.New(t).Resources.Storage.Servers[0]
	fx := fixture.New(t, "--etcd-servers-overrides=/configmaps#"+other)
	s, ctx := fx.Resources.Storage, t.Context()
	if err := s.CheckOverrides(); err != nil {
		t.Fatal(err)
	}
	if len(s.Etcds()) != 2 || s.Etcds()[0].Log != eventlog.Main || s.Etcds()[1].Log == eventlog.Main {
		t.Fatalf("%d etcds", len(s.Etcds()))
	}
	etcd := s.Etcds()[1]
	for range 10 { // the etcds have different revisions
		if _, err := etcd.Client.Put(ctx, etcd.OwnKey("x"), ""); err != nil {
			t.Fatal(err)
		}
	}
	body := []byte(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`)
	if _, err := fx.Write(ctx, fixture.ConfigMaps, &registryv1.WriteRequest{Verb: "create", Body: body},
		&fixture.Callbacks{}); err != nil {
		t.Fatal(err)
	}
	for i, e := range s.Etcds() {
		resp, err := e.Client.Client.Get(ctx, "/registry/configmaps/x/a", clientv3.WithCountOnly())
		if err != nil || resp.Count != int64(i) {
			t.Errorf("etcd %d has %d keys, %v", i, resp.Count, err)
		}
	}
	st, _ := s.ByName("configmaps")
	pods, _ := s.ByName("pods")
	if st.Etcd != etcd || pods.Etcd != s.Etcd {
		t.Error("a resource has the wrong etcd")
	}
	scope, ok := fx.Resources.BuiltIn.RequestScope(fixture.ConfigMaps)
	if !ok || scope.APIResource.Log != string(etcd.Log) {
		t.Error("discovery does not name the log")
	}
	want, err := etcd.ReadRevision(ctx)
	if err != nil {
		t.Fatal(err)
	}
	got, err := fx.Source.Revision(ctx, &registryv1.RevisionRequest{Log: string(etcd.Log)})
	if err != nil || got.Revision != want {
		t.Errorf("revision %d, not %d, %v", got.GetRevision(), want, err)
	}
	_, err = fx.Source.Revision(ctx, &registryv1.RevisionRequest{Log: "x"})
	if status.Code(err) != codes.FailedPrecondition {
		t.Errorf("an unknown log: %v", err)
	}
}

// An override without an effect is refused.
func TestOverridesWithoutEffect(t *testing.T) {
	other := fixture.New(t).Resources.Storage.Servers[0]
	for _, resource := range []string{
		"foo/bars",
		"apps/pods",
		"events.k8s.io/events", // stored as /events
		"apiextensions.k8s.io/customresourcedefinitions",
	} {
		s := fixture.New(t, "--etcd-servers-overrides="+resource+"#"+other).Resources.Storage
		want := `--etcd-servers-overrides "` + resource + `"`
		if err := s.CheckOverrides(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", resource, err)
		}
	}
}
