package logreader

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus/testutil"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"

	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// A reader compares its objects with etcd's keys at the same revision. It names the objects that
// differ, and resets their resource.
func TestObjectsAreComparedWithEtcd(t *testing.T) {
	cachermetrics.Register()
	synctest.Test(t, func(t *testing.T) {
		row := func(name string, revision int64) *registryv1.Row {
			return &registryv1.Row{Namespace: "ns", Name: name, Revision: revision, Json: []byte("{}")}
		}
		cached := []*registryv1.Row{row("a", 3), row("b", 4), row("d", 5),
			{Namespace: "ns", Name: "odd", Revision: 6, Unreadable: "rubbish"}}
		etcd := cached
		var failure error
		l := newReader(Source{
			Rows: func(context.Context, string) ([]*registryv1.Row, int64, error) { return cached, 10, nil },
			ObjectKeys: func(_ context.Context, resource string, revision int64, each func(*registryv1.Row)) error {
				if resource != "configmaps" || revision != 10 {
					t.Errorf("%s at revision %d is read", resource, revision)
				}
				for _, r := range etcd {
					each(r)
				}
				return failure
			},
		})
		l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10})
		load := func() {
			if _, err := l.Snapshot(t.Context(), l.cache.Resource("configmaps"), ""); err != nil {
				t.Fatal(err)
			}
		}
		loaded := func() bool { return len(l.cache.Loaded()) > 0 }
		check := func() difference {
			s, _ := l.cache.Resource("configmaps").Loaded()
			d, _ := l.compareWithEtcd(t.Context(), s)
			l.checkResource(t.Context(), "configmaps")
			return d
		}
		load()
		if d := check(); d.count() != 0 || !loaded() {
			t.Errorf("equal objects: %v", &d)
		}
		failure = errors.New("etcd does not respond")
		check()
		failure = errOtherRevision
		check()
		if !loaded() {
			t.Error("a comparison that failed resets the resource")
		}
		failure, etcd = nil, []*registryv1.Row{row("a", 3), row("b", 9), row("c", 5), row("odd", 6), row("z", 7)}
		d := check()
		want := `2 objects are missing, 1 do not exist, 1 are of another revision, such as ["ns/b" "ns/c" "ns/d" "ns/z"]`
		if d.String() != want || loaded() {
			t.Errorf("got %v\nwant %s", &d, want)
		}
		for status, want := range map[string]float64{"success": 1, "error": 1, "failure": 1} {
			checks := cachermetrics.StorageConsistencyCheckTotal.CounterVec.WithLabelValues("", "configmaps", status)
			if got := testutil.ToFloat64(checks); got != want {
				t.Errorf("%s: %v", status, got)
			}
		}
		load()
	})
}
