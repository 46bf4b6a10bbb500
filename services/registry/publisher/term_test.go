package publisher

import (
	"testing"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"watershed.dev/platform/eventlog"
	"watershed.dev/platform/watchcache/core"
	"watershed.dev/services/registry/customresources"
	"watershed.dev/services/registry/internal/fixture"
)

// hasEvent proves that etcd was not restored, and a new log begins at the oldest revision that etcd can read.
func TestRequestsToEtcd(t *testing.T) {
	s := fixture.New(t).Resources.Storage
	p := &Publisher{Storage: s, Etcd: s.Etcd, Log: &eventlog.Options{Name: "test"}}
	etcd := p.Storage.Client.Client
	put := func(key string) int64 {
		t.Helper()
		resp, err := etcd.Put(t.Context(), key, "x")
		if err != nil {
			t.Fatal(err)
		}
		return resp.Header.Revision
	}
	put("/registry/a")
	last := put("/registry/a")
	put("/registry/deleted")
	gone, err := etcd.Delete(t.Context(), "/registry/deleted")
	if err != nil {
		t.Fatal(err)
	}
	now := put("/registry/b")
	for name, c := range map[string]struct {
		event core.EtcdEvent
		has   bool
	}{
		"as it was":            {core.EtcdEvent{Key: "/registry/a", Revision: last}, true},
		"etcd lacks the event": {core.EtcdEvent{Key: "/registry/b", Revision: last}, false},
		"it is in the future":  {core.EtcdEvent{Key: "/registry/a", Revision: now + 9}, false},
		"it was deleted here":  {core.EtcdEvent{Key: "/registry/a", Revision: last, Deleted: true}, false},
		"it never existed":     {core.EtcdEvent{Key: "/registry/c", Revision: last, Deleted: true}, false},
		"it was deleted": {core.EtcdEvent{Key: "/registry/deleted", Revision: gone.Header.Revision, Deleted: true},
			true},
	} {
		if got, err := p.readEtcd(t.Context(), c.event); err != nil || got.HasEvent != c.has || got.Revision != now {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	for c, want := range map[[2]int64]int64{{1 << 40, 0}: 1, {2, 0}: now - 2, {2, maxReaderLag + 2}: 2} {
		if got, err := p.oldestRevision(t.Context(), now, c[0], c[1]); err != nil || got != want {
			t.Errorf("the oldest of the last %d revisions, with readers at %d, is %d, not %d (%v)", c[0], c[1], got, want, err)
		}
	}
	if _, err := etcd.Compact(t.Context(), last, clientv3.WithCompactPhysical()); err != nil {
		t.Fatal(err)
	}
	if got, err := p.oldestRevision(t.Context(), now, 1<<40, 0); err != nil || got != last {
		t.Errorf("the oldest revision after a compaction is %d, not %d (%v)", got, last, err)
	}
}

// The publisher of an etcd publishes the resources that the etcd stores, and custom resources only from the main etcd.
func TestResourcesOfAnEtcd(t *testing.T) {
	other := fixture.New(t).Resources.Storage.Servers[0]
	s := fixture.New(t, "--etcd-servers-overrides=/configmaps#"+other).Resources.Storage
	for i, published := range []string{"pods", "configmaps"} {
		p := &Publisher{Storage: s, Etcd: s.Etcds()[i], Log: &eventlog.Options{Name: "test", ID: s.Etcds()[i].Log}}
		now, err := p.Etcd.ReadRevision(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if p.crds, err = customresources.CRDsAt(t.Context(), s, p.Etcd, now); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"pods", "configmaps"} {
			if _, ok := p.resourceByKey("/registry/" + name + "/x/a"); ok != (name == published) {
				t.Errorf("etcd %d: %s is published: %v", i, name, ok)
			}
		}
	}
}

// The objects of a CRD that cannot be decoded, because a KMS is away for example, reset their resource: their events
// would otherwise be missing. Once the CRD can be decoded, the next events are published.
func TestObjectsOfAnUnreadableCRDResetTheirResource(t *testing.T) {
	s := fixture.New(t).Resources.Storage
	p := &Publisher{Storage: s, Etcd: s.Etcds()[0], Log: &eventlog.Options{Name: "test"}}
	const widget = `{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"w","namespace":"x","uid":"u"}}`
	const readable = `{"apiVersion":"apiextensions.k8s.io/v1","kind":"CustomResourceDefinition",
"metadata":{"name":"widgets.example.com"},"spec":{"group":"example.com","scope":"Namespaced",
"names":{"plural":"widgets","singular":"widget","kind":"Widget","listKind":"WidgetList"},
"versions":[{"name":"v1","served":true,"storage":true,
"schema":{"openAPIV3Schema":{"type":"object","x-kubernetes-preserve-unknown-fields":true}}}]},
"status":{"storedVersions":["v1"],
"acceptedNames":{"plural":"widgets","singular":"widget","kind":"Widget","listKind":"WidgetList"},
"conditions":[{"type":"NamesAccepted","status":"True"},{"type":"Established","status":"True"}]}}`
	crd := s.Prefix() + "apiextensions.k8s.io/customresourcedefinitions/widgets.example.com"
	put := func(key, value string) *mvccpb.Event {
		t.Helper()
		r, err := p.Etcd.Client.Client.Put(t.Context(), key, value)
		if err != nil {
			t.Fatal(err)
		}
		kv := &mvccpb.KeyValue{
			Key:            []byte(key),
			Value:          []byte(value),
			CreateRevision: r.Header.Revision,
			ModRevision:    r.Header.Revision,
		}
		return &mvccpb.Event{Type: mvccpb.PUT, Kv: kv}
	}
	expect := func(about string, got core.Change, published, reset bool) {
		t.Helper()
		if got.Resource != "widgets.example.com" || (got.Event != nil) != published || (got.Err != nil) != reset {
			t.Errorf("%s: %+v", about, got)
		}
	}
	object := func() *mvccpb.Event { return put(s.Prefix()+"example.com/widgets/x/w", widget) }
	put(crd, "rubbish")
	now, err := p.Etcd.ReadRevision(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if p.crds, err = customresources.CRDsAt(t.Context(), s, p.Etcd, now); err != nil {
		t.Fatal(err)
	}
	expect("the CRD cannot be decoded at the begin of the term", p.decodeEvent(t.Context(), object(), 0), false, true)
	put(crd, readable)
	expect("the CRD can be decoded again", p.decodeEvent(t.Context(), object(), 0), false, true)
	expect("the next event", p.decodeEvent(t.Context(), object(), 0), true, false)
	got := p.decodeEvent(t.Context(), put(crd, "rubbish"), 0)
	if got.Err == nil || got.CRDChanged != "widgets.example.com" {
		t.Errorf("an event of the CRD that cannot be decoded: %+v", got)
	}
	expect("after that event", p.decodeEvent(t.Context(), object(), 0), false, true)
	if got := p.decodeEvent(t.Context(), put(crd, readable), 0); got.Err != nil {
		t.Errorf("an event of the CRD: %+v", got)
	}
	expect("after its mend", p.decodeEvent(t.Context(), object(), 0), true, false)
	if got := p.decodeEvent(t.Context(), put(s.Prefix()+"example.com/others/x/w", widget), 0); got.Resource != "" {
		t.Errorf("a key of no resource: %+v", got)
	}
}
