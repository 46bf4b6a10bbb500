package source_test

import (
	"bytes"
	"context"
	"fmt"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"

	"watershed.dev/platform/rpc"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// chunks records a snapshot's stream.
type chunks struct {
	grpc.ServerStreamingServer[registryv1.SnapshotChunk]
	ctx context.Context
	all []*registryv1.SnapshotChunk
}

func (c *chunks) Context() context.Context { return c.ctx }

func (c *chunks) SendMsg(m any) error {
	held := m.(*rpc.Held)
	held.Release()
	c.all = append(c.all, held.Message.(*registryv1.SnapshotChunk))
	return nil
}

func create(t *testing.T, fx *fixture.Fixture, resource *commonv1.Resource, body string) {
	t.Helper()
	if _, err := fx.Write(t.Context(), resource, &registryv1.WriteRequest{Verb: "create", Body: []byte(body)},
		&fixture.Callbacks{}); err != nil {
		t.Fatal(err)
	}
}

// A snapshot has every object of one revision, in messages of bounded size. A value that cannot be decoded is a row
// too.
func TestSnapshot(t *testing.T) {
	fx := fixture.New(t)
	snapshot := func() (rows []*registryv1.Row, messages int) {
		t.Helper()
		c := &chunks{ctx: t.Context()}
		if err := fx.Source.Snapshot(&registryv1.SnapshotRequest{StorageResource: "configmaps"}, c); err != nil {
			t.Fatal(err)
		}
		for _, m := range c.all {
			if m.Revision != c.all[0].Revision || m.Revision == 0 {
				t.Errorf("revisions %d and %d", m.Revision, c.all[0].Revision)
			}
			rows = append(rows, m.Rows...)
		}
		return rows, len(c.all)
	}
	if rows, messages := snapshot(); len(rows) != 0 || messages != 1 {
		t.Errorf("an empty snapshot has %d rows in %d messages", len(rows), messages)
	}
	large := strings.Repeat("x", 900<<10)
	for i := range 25 { // more than one page, and more than one message
		create(t, fx, fixture.ConfigMaps, fmt.Sprintf(
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"c%02d","labels":{"n":"%d"}},"data":{"k":%q}}`, i,
			i, large))
	}
	if _, err := fx.Resources.Storage.Client.Client.Put(t.Context(),
		"/registry/configmaps/x/odd", "rubbish"); err != nil {
		t.Fatal(err)
	}
	rows, messages := snapshot()
	if len(rows) != 26 || messages < 5 {
		t.Errorf("%d rows in %d messages", len(rows), messages)
	}
	for _, r := range rows {
		switch {
		case r.Name == "odd":
			if r.Unreadable == "" {
				t.Error("a row that cannot be decoded has no error")
			}
		case r.Namespace != "x" || r.Labels["n"] == "" || r.Revision == 0 ||
			!bytes.Contains(r.Json, []byte(`"data":{"k":"xxx`)) || len(r.Protobuf) == 0:
			t.Errorf("row %s/%s: %v, %d, %.80s", r.Namespace, r.Name, r.Labels, r.Revision, r.Json)
		}
	}
}

// A snapshot of keys has the revision that the caller asks for. It needs the feature gate DetectCacheInconsistency.
func TestASnapshotOfKeys(t *testing.T) {
	fx := fixture.New(t)
	create(t, fx, fixture.ConfigMaps, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`)
	etcd := fx.Resources.Storage.Client.Client
	odd, err := etcd.Put(t.Context(), "/registry/configmaps/x/odd", "rubbish")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := etcd.Delete(t.Context(), "/registry/configmaps/x/a"); err != nil {
		t.Fatal(err)
	}
	c := &chunks{ctx: t.Context()}
	r := &registryv1.SnapshotRequest{StorageResource: "configmaps", Revision: odd.Header.Revision, KeysOnly: true}
	if err := fx.Source.Snapshot(r, c); err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, m := range c.all {
		for _, row := range m.Rows {
			got = append(got, fmt.Sprintf("%s/%s %d", row.Namespace, row.Name, m.Revision-row.Revision))
			if row.Json != nil || row.Protobuf != nil {
				t.Error("a row has an object")
			}
		}
	}
	if fmt.Sprint(got) != "[x/a 1 x/odd 0]" {
		t.Errorf("%q", got)
	}
	r.Sample = make([]string, 101)
	if err := fx.Source.Snapshot(r, &chunks{ctx: t.Context()}); status.Code(err) != codes.InvalidArgument {
		t.Errorf("a sample of 101 objects: %v", err)
	}
	gates, gate := utilfeature.DefaultFeatureGate, features.DetectCacheInconsistency
	featuregatetesting.SetFeatureGateDuringTest(t, gates, gate, false)
	if err := fx.Source.Snapshot(r, &chunks{ctx: t.Context()}); status.Code(err) != codes.Unimplemented {
		t.Errorf("without the gate: %v", err)
	}
}

// A snapshot of keys has the objects of its sample, also from pages that are read without values.
func TestASnapshotOfKeysWithASample(t *testing.T) {
	fx := fixture.New(t)
	const objects = 100
	for i := range objects {
		create(t, fx, fixture.ConfigMaps,
			fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a%02d"}}`, i))
	}
	read := func(r *registryv1.SnapshotRequest) (rows []*registryv1.Row) {
		t.Helper()
		r.StorageResource = "configmaps"
		c := &chunks{ctx: t.Context()}
		if err := fx.Source.Snapshot(r, c); err != nil {
			t.Fatal(err)
		}
		for _, m := range c.all {
			rows = append(rows, m.Rows...)
		}
		return rows
	}
	whole := read(&registryv1.SnapshotRequest{})
	keys := []string{"x/a03", "x/a50", "x/a99", "y/a51", "a52"}
	sampled := read(&registryv1.SnapshotRequest{KeysOnly: true, Sample: keys})
	if len(whole) != objects || len(sampled) != objects {
		t.Fatalf("%d and %d rows", len(whole), len(sampled))
	}
	for i, row := range sampled {
		want := whole[i]
		if i != 3 && i != 50 && i != 99 {
			want = &registryv1.Row{Namespace: "x", Name: want.Name, Revision: want.Revision}
		}
		if !proto.Equal(row, want) {
			t.Errorf("row %d is %v, not %v", i, row, want)
		}
		if whole[i].Encoder == 0 {
			t.Error("a row has no encoder")
		}
	}
}

// Pages of keys grow to as many keys as make 8 MB with their values in etcd. Every second page has values, and their
// sizes limit the next page.
func TestPagesOfKeys(t *testing.T) {
	fx := fixture.New(t)
	for resource, c := range map[string]struct {
		keys, bytes, pages int
	}{
		"configmaps": {500, 10, 6},
		"secrets":    {45, 512 << 10, 3},
	} {
		st, _ := fx.Resources.Storage.ByName(resource)
		value := strings.Repeat("x", c.bytes)
		for i := range c.keys {
			key := st.Key("x", fmt.Sprintf("%03d", i))
			if _, err := st.Etcd.Client.Client.Put(t.Context(), key, value); err != nil {
				t.Fatal(err)
			}
		}
		out := &chunks{ctx: t.Context()}
		r := &registryv1.SnapshotRequest{StorageResource: resource, KeysOnly: true}
		if err := fx.Source.Snapshot(r, out); err != nil {
			t.Fatal(err)
		}
		rows := 0
		for _, m := range out.all {
			rows += len(m.Rows)
			if bytes := len(m.Rows) * c.bytes; bytes > 10<<20 { // the first page has 20 keys
				t.Errorf("%s: a page has %d bytes of values in etcd", resource, bytes)
			}
		}
		if rows != c.keys || len(out.all) > c.pages {
			t.Errorf("%s: %d keys in %d pages, not %d in %d", resource, rows, len(out.all), c.keys, c.pages)
		}
	}
}

// Encode converts stored objects to another version, and to rows of a Table.
func TestEncode(t *testing.T) {
	fx := fixture.New(t)
	hpas := &commonv1.Resource{Group: "autoscaling", Version: "v2", Resource: "horizontalpodautoscalers"}
	create(t, fx, hpas, `{"apiVersion":"autoscaling/v2","kind":"HorizontalPodAutoscaler","metadata":{"name":"h"},
		"spec":{"maxReplicas":3,"scaleTargetRef":{"kind":"Deployment","name":"d","apiVersion":"apps/v1"}}}`)
	c := &chunks{ctx: t.Context()}
	name := "horizontalpodautoscalers.autoscaling"
	if err := fx.Source.Snapshot(&registryv1.SnapshotRequest{StorageResource: name}, c); err != nil {
		t.Fatal(err)
	}
	row := c.all[0].Rows[0]
	encode := func(version string, as *commonv1.Kind) (*registryv1.EncodeResponse, error) {
		return fx.Source.Encode(t.Context(), &registryv1.EncodeRequest{
			StorageResource: name,
			Resource: &commonv1.Resource{Group: "autoscaling", Version: version,
				Resource: "horizontalpodautoscalers"},
			Output:   &registryv1.Output{MediaType: "application/json", As: as},
			Json:     [][]byte{nil},
			Protobuf: [][]byte{row.Protobuf},
		})
	}
	old, err := encode("v1", nil)
	if err != nil || len(old.Objects) != 1 || !bytes.Contains(old.Objects[0], []byte(`"maxReplicas":3`)) {
		t.Errorf("%v, %s", err, old.GetObjects())
	}
	table, err := encode("v2", &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"})
	if err != nil || !bytes.Contains(table.Columns, []byte(`"name":"MinPods"`)) ||
		!bytes.Contains(table.Objects[0], []byte(`"cells":["h","Deployment/d"`)) {
		t.Errorf("%v, %s, %.300s", err, table.GetColumns(), table.GetObjects())
	}
	if _, err := encode("v3", nil); err == nil {
		t.Error("an unknown version is encoded")
	}
}

// Revision returns the revision of a read that begins after the call.
func TestRevision(t *testing.T) {
	fx := fixture.New(t)
	before, err := fx.Source.Revision(t.Context(), &registryv1.RevisionRequest{})
	if err != nil {
		t.Fatal(err)
	}
	create(t, fx, fixture.ConfigMaps, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`)
	after, err := fx.Source.Revision(t.Context(), &registryv1.RevisionRequest{})
	if err != nil || after.Revision != before.Revision+1 {
		t.Errorf("%d, then %d (%v)", before.Revision, after.GetRevision(), err)
	}
}

// A log may have encrypted events of a resource that has moved to another etcd. They have no key, so that the reader
// of the log does not wait for the other etcd.
func TestEventsOfAMovedResourceHaveNoKey(t *testing.T) {
	fx := fixture.New(t)
	for _, log := range []string{"", "moved"} {
		_, err := fx.Source.DataKey(t.Context(),
			&registryv1.DataKeyRequest{StorageResource: "secrets", Key: "1-a", Log: log})
		want := fmt.Sprintf("the event log %q does not have secrets", log)
		if status.Code(err) != codes.FailedPrecondition || strings.Contains(err.Error(), want) != (log == "moved") {
			t.Errorf("log %q: %v", log, err)
		}
	}
}
