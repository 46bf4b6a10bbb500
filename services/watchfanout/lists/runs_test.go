package lists_test

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"sync"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/internal/world"
	"watershed.dev/services/watchfanout/lists"
)

// many are enough pods for several runs.
const many = 6000

// compressed asks for a list as gzip, and for the same as it is; it answers both, and how many runs were kept and made.
func compressed(t *testing.T, l *lists.Lists, r *watchfanoutv1.ListRequest) (gzipped, plain []byte, kept, made float64) {
	t.Helper()
	r.Gzip = false
	as := &body{ctx: t.Context()}
	if err := l.List(r, as); err != nil {
		t.Fatal(err)
	}
	keptBefore, madeBefore := asked(t, l)
	r.Gzip = true
	got := &body{ctx: t.Context()}
	if err := l.List(r, got); err != nil {
		t.Fatal(err)
	}
	kept, made = asked(t, l)
	if got.size != as.size || !got.gzip {
		t.Errorf("%d bytes are said to be %d, gzip %v", as.size, got.size, got.gzip)
	}
	from, err := gzip.NewReader(&got.data)
	if err != nil {
		t.Fatal(err)
	}
	if gzipped, err = io.ReadAll(from); err != nil {
		t.Fatal(err)
	}
	return gzipped, as.data.Bytes(), kept - keptBefore, made - madeBefore
}

// asked is how many runs were asked for that were kept, and that were not.
func asked(t *testing.T, l *lists.Lists) (kept, made float64) {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(l.Metrics()...)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "watershed_watchfanout_compressed_runs_total" {
			continue
		}
		for _, m := range f.Metric {
			if m.Label[0].GetValue() == "true" {
				kept = m.Counter.GetValue()
			} else {
				made = m.Counter.GetValue()
			}
		}
	}
	return kept, made
}

// What is compressed is the list, and what has not changed is not compressed again.
func TestRuns(t *testing.T) {
	w := world.New(t)
	l := lists.New(w.Catalog, w.Cache, w.Log, w.Converter, 1<<20)
	consistent := func() *watchfanoutv1.ListRequest {
		return &watchfanoutv1.ListRequest{Query: world.Query(), ResourceVersion: "0"}
	}
	same := func(what string, r *watchfanoutv1.ListRequest) (kept, made float64) {
		t.Helper()
		got, want, kept, made := compressed(t, l, r)
		if !bytes.Equal(got, want) {
			t.Fatalf("%s: %d bytes are not the %d of the list", what, len(got), len(want))
		}
		return kept, made
	}
	if _, err := ask(t, l, consistent()); err != nil { // which has it loaded
		t.Fatal(err)
	}
	for i := range many {
		w.Apply(logv1.Type_TYPE_ADDED, 11+int64(i), fmt.Sprintf("pod-%05d", i), "node-0", "")
	}
	kept, made := same("the first", consistent())
	if kept != 0 || made < 4 {
		t.Errorf("%v runs kept and %v made", kept, made)
	}
	runs := made
	if kept, made = same("the same again", consistent()); kept != runs || made != 0 {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
	w.Apply(logv1.Type_TYPE_MODIFIED, 20000, "pod-03000", "node-1", "node-0")
	if _, made = same("one changed", consistent()); made != 1 {
		t.Errorf("%v runs made", made)
	}
	w.Apply(logv1.Type_TYPE_DELETED, 20001, "pod-00000", "node-0", "")
	if kept, made = same("one gone", consistent()); made > 2 || kept < runs-2 {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
	w.Apply(logv1.Type_TYPE_ADDED, 20002, "zzz", "node-0", "")
	if kept, made = same("one at the end", consistent()); made > 2 || kept < runs-2 {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
	page := consistent()
	page.ResourceVersion, page.Limit = "20002", 0
	page.Query.LabelSelector = "node=node-0"
	same("selected", page)
	partial := consistent()
	partial.Query.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadataList"}
	same("metadata alone", partial)
}

// Those who ask at once share what is made, and what does not fit in the bound is made again.
func TestRunsAreBoundedAndShared(t *testing.T) {
	w := world.New(t)
	const limit = 8 << 10
	l := lists.New(w.Catalog, w.Cache, w.Log, w.Converter, limit)
	r := func() *watchfanoutv1.ListRequest {
		return &watchfanoutv1.ListRequest{Query: world.Query(), ResourceVersion: "0"}
	}
	if _, err := ask(t, l, r()); err != nil {
		t.Fatal(err)
	}
	for i := range many {
		w.Apply(logv1.Type_TYPE_ADDED, 11+int64(i), fmt.Sprintf("pod-%05d", i), "node-0", "")
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			q := r()
			q.Gzip = true
			if err := l.List(q, &body{ctx: t.Context()}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	reg := prometheus.NewRegistry()
	reg.MustRegister(l.Metrics()...)
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "watershed_watchfanout_compressed_bytes" {
			if held := f.Metric[0].Gauge.GetValue(); held > limit || held < limit/2 {
				t.Errorf("%v bytes are kept", held)
			}
		}
	}
}
