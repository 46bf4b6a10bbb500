package conversion_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"watershed.dev/platform/watchcache/cache"
	"watershed.dev/platform/watchcache/conversion"
	"watershed.dev/platform/watchcache/query"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// fakeRegistry encodes an object as its number of bytes, and records the size of each batch.
type fakeRegistry struct {
	registryv1.SourceClient
	batches []int
	short   bool
	// columns, ages and cell define the rows that it returns.
	columns string
	ages    func(row string) *registryv1.RowAges
	cell    string
}

func (r *fakeRegistry) Encode(_ context.Context, m *registryv1.EncodeRequest,
	_ ...grpc.CallOption) (*registryv1.EncodeResponse, error) {
	r.batches = append(r.batches, len(m.Json))
	out := &registryv1.EncodeResponse{Columns: []byte("[]" + r.columns)}
	for _, o := range m.Json {
		row := fmt.Sprintf(`{"cells":[%d%s],"object":null}`, len(o), r.cell)
		out.Objects = append(out.Objects, []byte(row))
		if r.ages != nil {
			out.RowAges = append(out.RowAges, r.ages(row))
		}
	}
	if r.short {
		out.Objects = out.Objects[1:]
	}
	return out, nil
}

// newQuery returns a query for pods. They are stored in v2, and the query is for v1 or for a Table of the stored
// version.
func newQuery(t *testing.T, as string) *query.Query {
	t.Helper()
	stored := "v2"
	if as == "Table" {
		stored = "v1"
	}
	q, err := query.New(&registryv1.APIResource{
		StorageResource: "pods",
		Resource:        &commonv1.Resource{Version: "v1", Resource: "pods"},
		Kind:            &commonv1.Kind{Version: "v1", Kind: "Pod"},
		StoredKind:      &commonv1.Kind{Version: stored, Kind: "Pod"},
	}, &watchfanoutv1.Query{Output: &registryv1.Output{
		MediaType: "application/json",
		As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: as},
	}})
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func items(n, bytes int) (all []*cache.Item) {
	for i := range n {
		body := fmt.Sprintf(`{"metadata":{"name":"%s%d"}}`, strings.Repeat("0", bytes), i)
		all = append(all, cache.ItemOf(&registryv1.Row{Name: fmt.Sprint(i), Json: []byte(body)}))
	}
	return all
}

// Objects are encoded in bounded batches, each object once.
func TestObjectsAreEncodedInBatches(t *testing.T) {
	for name, c := range map[string]struct {
		items []*cache.Item
		asked string
	}{
		"none":   {nil, "[]"},
		"many":   {items(600, 10), "[250 250 100]"},
		"large":  {items(5, 2<<20), "[1 1 1 1 1]"},
		"middle": {items(5, 1<<20), "[3 2]"},
	} {
		r := &fakeRegistry{}
		converter := conversion.New(conversion.Remote(r), cache.New(1<<20, 0), conversion.CacheBytes)
		q := newQuery(t, "")
		for range 2 {
			parts, err := converter.Convert(t.Context(), q, c.items)
			if err != nil || len(parts) != len(c.items) {
				t.Fatalf("%s: %d parts, %v", name, len(parts), err)
			}
			for i, p := range parts {
				if want := fmt.Sprintf(`{"cells":[%d],"object":null}`, c.items[i].JSONSize()); string(p) != want {
					t.Errorf("%s: %d is %s, not %s", name, i, p, want)
				}
			}
		}
		if got := fmt.Sprint(r.batches); got != c.asked {
			t.Errorf("%s: requested %s, not %s", name, got, c.asked)
		}
	}
}

// A response that lacks an object is an error. No client receives another object's bytes.
func TestAShortResponseIsAnError(t *testing.T) {
	short := conversion.Remote(&fakeRegistry{short: true})
	converter := conversion.New(short, cache.New(1<<20, 0), conversion.CacheBytes)
	if _, err := converter.Convert(t.Context(), newQuery(t, ""), items(3, 1)); status.Code(err) != codes.Internal {
		t.Errorf("%v", err)
	}
	if _, err := converter.Fields(t.Context(), newQuery(t, ""), items(3, 1)); status.Code(err) != codes.Internal {
		t.Errorf("%v", err)
	}
}

// age returns the ages of a row with an additional cell, which is the time since a moment.
func age(since time.Time) func(string) *registryv1.RowAges {
	return func(row string) *registryv1.RowAges {
		return &registryv1.RowAges{Complete: true, Ages: []*registryv1.Age{{
			Offset:  int32(strings.Index(row, `5s`)),
			Length:  int32(len(`5s`)),
			Seconds: since.Unix(),
			Nanos:   int32(since.Nanosecond()),
		}}}
	}
}

// A row is encoded once, and its age is recomputed. A row with other time-dependent cells is encoded again after a
// second.
func TestRowsAreCachedAndTheirAgesRecomputed(t *testing.T) {
	// synctest's clock advances; nothing really sleeps.
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRegistry{cell: `,"5s"`, ages: age(time.Now().Add(-5 * time.Second))}
		converter := conversion.New(conversion.Remote(r), cache.New(1<<20, 0), conversion.CacheBytes)
		all, q := items(3, 4), newQuery(t, "Table")
		shows := func(cell string) {
			t.Helper()
			rows, err := converter.Rows(t.Context(), q, all)
			if err != nil || rows.Len() != 3 || string(rows.Columns) != "[]" {
				t.Fatalf("%+v, %v", rows, err)
			}
			want := fmt.Sprintf(`{"cells":[29,%s],"object":{"kind":"PartialObjectMetadata",`+
				`"apiVersion":"meta.k8s.io/v1","metadata":{"name":"00001"}}}`, cell)
			if got := string(rows.JSON(1)); got != want {
				t.Errorf("the row is %s, not %s", got, want)
			}
		}
		shows(`"5s"`)
		shows(`"5s"`)
		time.Sleep(time.Minute)
		shows(`"65s"`)
		time.Sleep(5 * time.Minute)
		shows(`"6m5s"`)
		if got := fmt.Sprint(r.batches); got != "[3 0 0]" { // the columns after a second, the rows never
			t.Errorf("requested %s", got)
		}
		time.Sleep(4 * time.Minute)
		r.batches = nil
		shows(`"10m"`)
		if got := fmt.Sprint(r.batches); got != "[3]" {
			t.Errorf("after rowTTL requested %s", got)
		}

		q.IncludeObject = "None"
		q.EncodingKey.Event = "another encoding"
		r.ages = age(time.Now().Add(time.Hour))
		rows, err := converter.Rows(t.Context(), q, all)
		if want := `{"cells":[29,"\u003cinvalid\u003e"],"object":null}`; err != nil ||
			string(rows.JSON(0)) != want {
			t.Errorf("%s, not %s: %v", rows.JSON(0), want, err)
		}

		for name, ages := range map[string]func(string) *registryv1.RowAges{
			"other cells":   func(string) *registryv1.RowAges { return &registryv1.RowAges{} },
			"unknown ages":  func(string) *registryv1.RowAges { return nil },
			"an older peer": nil,
		} {
			r.ages, r.batches, q.EncodingKey.Event = ages, nil, name
			for range 3 {
				if _, err := converter.Rows(t.Context(), q, all); err != nil {
					t.Fatal(err)
				}
				time.Sleep(600 * time.Millisecond)
			}
			if got := fmt.Sprint(r.batches); got != "[3 3]" {
				t.Errorf("%s: requested %s", name, got)
			}
		}
	})
}

// An object in another version is encoded again after a minute, and after a change of its CRD.
func TestVersionsAreCached(t *testing.T) {
	// synctest's clock advances; nothing really sleeps.
	synctest.Test(t, func(t *testing.T) {
		r, held := &fakeRegistry{}, cache.New(1<<20, 0)
		held.Apply(&logv1.Event{Type: logv1.Type_TYPE_RESET, Revision: 5, Epoch: "h"})
		converter := conversion.New(conversion.Remote(r), held, conversion.CacheBytes)
		all, q := items(3, 4), newQuery(t, "")
		for _, step := range []struct {
			after func()
			asked string
		}{
			{func() {}, "[3]"},
			{func() { time.Sleep(50 * time.Second) }, "[3]"},
			{func() { time.Sleep(15 * time.Second) }, "[3 3]"},
			{func() {
				held.Apply(&logv1.Event{
					Type: logv1.Type_TYPE_RESET, Revision: 7, StorageResource: "pods", Epoch: "h", CrdChanged: true,
				})
			}, "[3 3 3]"},
		} {
			step.after()
			if _, err := converter.Convert(t.Context(), q, all); err != nil {
				t.Fatal(err)
			}
			if got := fmt.Sprint(r.batches); got != step.asked {
				t.Errorf("requested %s, not %s", got, step.asked)
			}
		}
		time.Sleep(time.Hour)
		converter.Sweep()
		for _, m := range converter.Metrics() {
			if g, ok := m.(prometheus.Gauge); ok && testutil.ToFloat64(g) != 0 {
				t.Errorf("%v bytes of idle encodings are cached", testutil.ToFloat64(g))
			}
		}
	})
}

// Rows belong to the columns that they were printed with. The rows of two releases are not mixed.
func TestRowsAreOfTheirColumns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := &fakeRegistry{cell: `,"5s"`, ages: age(time.Now())}
		converter := conversion.New(conversion.Remote(r), cache.New(1<<20, 0), conversion.CacheBytes)
		all, q := items(3, 4), newQuery(t, "Table")
		for range 2 {
			if _, err := converter.Rows(t.Context(), q, all[:2]); err != nil {
				t.Fatal(err)
			}
		}
		r.columns, r.cell = " ", `,"5s",true`
		// The third item is not cached, and registry returns other columns with it.
		rows, err := converter.Rows(t.Context(), q, all)
		if err != nil || string(rows.Columns) != "[] " ||
			!strings.HasPrefix(string(rows.Heads[0]), `{"cells":[29,"0s",true]`) {
			t.Errorf("%s %s, %v", rows.Columns, rows.Heads[0], err)
		}
		if got := fmt.Sprint(r.batches); got != "[2 1 3]" {
			t.Errorf("requested %s", got)
		}
	})
}

// An age outside its row is an error.
func TestAWrongAgeIsAnError(t *testing.T) {
	for name, a := range map[string]*registryv1.Age{
		"before":   {Offset: -1, Length: 2},
		"after":    {Offset: 5, Length: 200},
		"negative": {Offset: 12, Length: -3},
	} {
		r := &fakeRegistry{ages: func(string) *registryv1.RowAges {
			return &registryv1.RowAges{Complete: true, Ages: []*registryv1.Age{a}}
		}}
		converter := conversion.New(conversion.Remote(r), cache.New(1<<20, 0), conversion.CacheBytes)
		if _, err := converter.Rows(t.Context(), newQuery(t, "Table"), items(1, 4)); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
