package logreader

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

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
			Rows: func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
				for _, r := range cached {
					add(r)
				}
				return 10, nil
			},
			ObjectKeys: func(_ context.Context, resource string, revision int64, _ []string,
				each func(*registryv1.Row)) error {
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
		// The comparison on demand has the result of the periodic comparison.
		compared := func(want *Comparison) {
			t.Helper()
			if got := l.CompareWithEtcd(t.Context()); !reflect.DeepEqual(got, want) {
				t.Errorf("got %+v, want %+v", got, want)
			}
		}
		check := func() difference {
			s, _ := l.cache.Resource("configmaps").Loaded()
			d, _ := l.compareWithEtcd(t.Context(), s, nil)
			_, _ = l.checkResource(t.Context(), "configmaps")
			return d
		}
		compared(&Comparison{})
		load()
		if d := check(); d.count() != 0 || !loaded() {
			t.Errorf("equal objects: %v", &d)
		}
		compared(&Comparison{Resources: 1, Objects: 3}) // of an unknown encoder
		failure = errors.New("etcd does not respond")
		check()
		compared(&Comparison{Errors: []string{"configmaps: etcd does not respond"}})
		failure = errOtherRevision
		check()
		compared(&Comparison{Disabled: true})
		if !loaded() {
			t.Error("a comparison that failed resets the resource")
		}
		failure, etcd = nil, []*registryv1.Row{row("a", 3), row("b", 9), row("c", 5), row("odd", 6), row("z", 7)}
		d := check()
		want := `2 objects are missing, 1 do not exist, 1 are of another revision, 0 have another value, ` +
			`such as ["ns/b" "ns/c" "ns/d" "ns/z"]`
		if d.String() != want || loaded() {
			t.Errorf("got %v\nwant %s", &d, want)
		}
		_, objects, _ := strings.Cut(l.Differing(), "\n")
		objects, _, _ = strings.Cut(objects, "\n2000-") // of the second comparison
		if !strings.Contains(l.Differing(), "configmaps at revision 10") ||
			objects != `"ns/b" 4 9`+"\n"+`"ns/c" 0 5`+"\n"+`"ns/d" 5 0`+"\n"+`"ns/z" 0 7` {
			t.Errorf("the differing objects are %q", l.Differing())
		}
		load()
		// The resource stays, because it has been reset within the minute.
		compared(&Comparison{Resources: 1, Objects: 3, Differences: []Difference{{Resource: "configmaps", Revision: 10,
			Missing: 2, Extra: 1, Stale: 1}}})
		if !loaded() {
			t.Error("a difference resets a resource twice within a minute")
		}
		for status, want := range map[string]float64{"success": 2, "error": 2, "failure": 2} {
			checks := cachermetrics.StorageConsistencyCheckTotal.CounterVec.WithLabelValues("", "configmaps", status)
			if got := testutil.ToFloat64(checks); got != want {
				t.Errorf("%s: %v", status, got)
			}
		}
	})
}

// A comparison compares the values of random objects, if the same encoder has encoded them. A replica with a wrong
// value resets the resource, and reads it again.
func TestValuesAreComparedWithEtcd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const objects = 3 * maxSampled
		row := func(n int, json string, encoder uint32) *registryv1.Row {
			return &registryv1.Row{Namespace: "ns", Name: fmt.Sprintf("%03d", n), Revision: 5, Json: []byte(json),
				Labels: map[string]string{"n": "1"}, Encoder: encoder}
		}
		flipped, encoder, crdChanges := -1, uint32(7), false
		l := newReader(Source{})
		l.source = Source{
			Revision: func(context.Context) (int64, error) {
				if crdChanges {
					l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 11, StorageResource: "pods",
						CrdChanged: true})
					return 11, nil
				}
				return l.cache.Progress(), nil
			},
			Rows: func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
				for n := range objects {
					json := `{"a":1}`
					if n == flipped {
						json = `{"a":3}`
					}
					add(row(n, json, 7))
				}
				flipped = -1
				return l.cache.Progress(), nil
			},
			ObjectKeys: func(_ context.Context, _ string, _ int64, sample []string, each func(*registryv1.Row)) error {
				if len(sample) != maxSampled {
					t.Errorf("%d objects are sampled", len(sample))
				}
				for n := range objects {
					r := row(n, `{"a":1}`, encoder)
					if !slices.Contains(sample, r.Namespace+"/"+r.Name) {
						r = &registryv1.Row{Namespace: r.Namespace, Name: r.Name, Revision: r.Revision}
					}
					each(r)
				}
				return nil
			},
		}
		l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10})
		// compare compares often enough to sample every object.
		compare := func() (found, values int) {
			t.Helper()
			if _, err := l.Snapshot(t.Context(), l.cache.Resource("pods"), ""); err != nil {
				t.Fatal(err)
			}
			for range 100 {
				c := l.CompareWithEtcd(t.Context())
				if len(c.Errors) > 0 {
					t.Fatal(c.Errors)
				}
				values += c.Values
				for _, d := range c.Differences {
					if found++; d.Altered != 1 || !d.Reset || d.Missing+d.Extra+d.Stale > 0 {
						t.Errorf("%+v", d)
					}
				}
			}
			return found, values
		}
		if n, values := compare(); n != 0 || values != 100*maxSampled {
			t.Errorf("%d equal values differ %d times", values, n)
		}
		reload := func(flip int) {
			l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10, StorageResource: "pods"})
			flipped = flip
		}
		reload(5)
		encoder = 8
		if n, values := compare(); n != 0 || values != 0 {
			t.Errorf("%d values of another encoder differ %d times", values, n)
		}
		reload(41)
		encoder = 7
		if n, _ := compare(); n != 1 || len(l.cache.Loaded()) > 0 {
			t.Errorf("a flipped value is found %d times", n)
		}
		if !strings.HasSuffix(l.Differing(), "\n\"ns/041\" 5 5 JSON from byte 5 of 7 on\n") {
			t.Errorf("%q", l.Differing())
		}
		if n, _ := compare(); n != 0 {
			t.Errorf("values that were read again differ %d times", n)
		}
		time.Sleep(time.Hour)
		reload(41)
		crdChanges = true
		if n, _ := compare(); n != 0 {
			t.Errorf("values of another CRD differ %d times", n)
		}
	})
}

// A sample has few bytes, and each object may be in it.
func TestASampleIsBounded(t *testing.T) {
	const objects = 30
	l := newReader(Source{Rows: func(_ context.Context, _ string, add func(*registryv1.Row)) (int64, error) {
		for n := range objects {
			add(&registryv1.Row{Name: fmt.Sprint(n), Json: make([]byte, maxSampledBytes/4*(n%2+1))})
		}
		return 0, nil
	}})
	s, err := l.Snapshot(t.Context(), l.cache.Resource("pods"), "")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for len(seen) < objects {
		total := 0
		for _, key := range sample(s) {
			i, _ := s.Get(key)
			total, seen[key] = total+i.JSONSize(), true
		}
		if total > maxSampledBytes {
			t.Fatalf("a sample has %d bytes", total)
		}
	}
}

// The objects of the newest differences are bounded in bytes.
func TestDifferingObjectsAreBounded(t *testing.T) {
	l := newReader(Source{})
	s, err := l.cache.Resource("pods").Snapshot(t.Context(), "",
		func(context.Context, string, func(*registryv1.Row)) (int64, error) { return 0, nil },
		func(context.Context, int64) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	var d difference
	for n := range 100_000 {
		d.add(&d.stale, fmt.Sprintf("namespace-%020d/name", n), 1, 2, "")
	}
	for range 2 {
		l.differing.add(s, d.objects)
	}
	if n := len(l.Differing()); n < maxDiffering || n > maxDiffering+1<<10 {
		t.Errorf("they have %d bytes", n)
	}
}

// Callers of a comparison share it. While it runs, no other resource is compared.
func TestComparisonsRunOneAtATime(t *testing.T) {
	cachermetrics.Register()
	synctest.Test(t, func(t *testing.T) {
		running, reads := 0, 0
		l := newReader(Source{
			Rows: func(context.Context, string, func(*registryv1.Row)) (int64, error) { return 10, nil },
			ObjectKeys: func(ctx context.Context, _ string, _ int64, _ []string, _ func(*registryv1.Row)) error {
				if running++; running > 1 {
					t.Error("two comparisons run together")
				}
				defer func() { running-- }()
				reads++
				select {
				case <-time.After(time.Second):
				case <-ctx.Done():
				}
				return ctx.Err()
			},
		})
		l.cache.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 10})
		for _, name := range []string{"configmaps", "pods", "secrets"} {
			if _, err := l.Snapshot(t.Context(), l.cache.Resource(name), ""); err != nil {
				t.Fatal(err)
			}
		}
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if c := l.CompareWithEtcd(t.Context()); c.Resources != 3 {
					t.Errorf("%+v", c)
				}
			})
		}
		wg.Wait()
		if reads > 20 { // callers that arrive during a read of a resource share the next
			t.Errorf("%d reads of etcd for 100 callers", reads)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer cancel()
		if c := l.CompareWithEtcd(ctx); c.Resources != 1 || len(c.Errors) != 1 {
			t.Errorf("a comparison whose time ends: %+v", c)
		}
		synctest.Wait()
	})
}
