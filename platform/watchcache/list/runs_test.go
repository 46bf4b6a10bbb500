package list_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"watershed.dev/platform/deflate"
	"watershed.dev/platform/watchcache/internal/fixture"
	"watershed.dev/platform/watchcache/list"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
)

// many is a number of pods that needs several runs.
const many = 6000

// runsOf returns a server of lists whose replica has many pods.
func runsOf(t *testing.T, limit int) (*fixture.Fixture, *list.Server) {
	t.Helper()
	w := fixture.New(t)
	l := list.New(w.Discovery, w.Cache, w.LogReader, w.Converter, limit)
	l.Seed(1)
	if _, err := getList(t, l, cached()); err != nil { // loads the resource
		t.Fatal(err)
	}
	for i := range many {
		w.Apply(logv1.Type_TYPE_ADDED, 11+int64(i), fmt.Sprintf("pod-%05d", i), "node-0", "")
	}
	return w, l
}

// cached returns a request with resourceVersion "0", which the cache serves at its own revision.
func cached() *watchfanoutv1.ListRequest {
	return &watchfanoutv1.ListRequest{Query: fixture.Query(), ResourceVersion: "0"}
}

// compressed requests a list as gzip and uncompressed, and compares the two. It returns how many runs were cached and
// how many were compressed.
func compressed(t *testing.T, l *list.Server, name string, r *watchfanoutv1.ListRequest) (hits, misses float64) {
	t.Helper()
	r.Gzip = false
	as := &body{ctx: t.Context()}
	if err := l.List(r, as); err != nil {
		t.Fatal(name, err)
	}
	hitsBefore, missesBefore := runRequests(t, l)
	r.Gzip = true
	got := &body{ctx: t.Context()}
	if err := l.List(r, got); err != nil {
		t.Fatal(name, err)
	}
	hits, misses = runRequests(t, l)
	if got.size != as.size || !got.gzip {
		t.Errorf("%s: %d bytes are reported as %d, gzip %v", name, as.size, got.size, got.gzip)
	}
	from, err := gzip.NewReader(&got.data)
	if err != nil {
		t.Fatal(name, err)
	}
	plain, err := io.ReadAll(from)
	if err != nil {
		t.Fatal(name, err)
	}
	if !bytes.Equal(plain, as.data.Bytes()) {
		t.Fatalf("%s: %d bytes are not the %d of the list", name, len(plain), as.data.Len())
	}
	return hits - hitsBefore, misses - missesBefore
}

// runRequests returns how many requested runs were cached and how many were not.
func runRequests(t *testing.T, l *list.Server) (hits, misses float64) {
	t.Helper()
	by := gathered(t, l, "watershed_watchfanout_compressed_runs_total")
	return by["true"], by["false"]
}

// gathered returns the values of a metric, by its label.
func gathered(t *testing.T, l *list.Server, name string) map[string]float64 {
	t.Helper()
	r := prometheus.NewRegistry()
	r.MustRegister(l.Metrics()...)
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.Metric {
			label := ""
			if len(m.Label) > 0 {
				label = m.Label[0].GetValue()
			}
			out[label] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return out
}

// The decompressed runs are the list. Unchanged runs are not compressed again.
func TestRuns(t *testing.T) {
	w, l := runsOf(t, 1<<20)
	hits, runs := compressed(t, l, "the first", cached())
	if hits != 0 || runs < 4 {
		t.Errorf("%v runs cached and %v compressed", hits, runs)
	}
	if hits, misses := compressed(t, l, "the same again", cached()); hits != runs || misses != 0 {
		t.Errorf("of %v runs %v cached and %v compressed", runs, hits, misses)
	}
	w.Apply(logv1.Type_TYPE_MODIFIED, 20000, "pod-03000", "node-1", "node-0")
	if _, misses := compressed(t, l, "one changed", cached()); misses != 1 {
		t.Errorf("%v runs compressed", misses)
	}
	w.Apply(logv1.Type_TYPE_DELETED, 20001, "pod-00000", "node-0", "")
	if hits, misses := compressed(t, l, "one gone", cached()); misses > 2 || hits < runs-2 {
		t.Errorf("of %v runs %v cached and %v compressed", runs, hits, misses)
	}
	w.Apply(logv1.Type_TYPE_ADDED, 20002, "zzz", "node-0", "")
	if hits, misses := compressed(t, l, "one at the end", cached()); misses > 2 || hits < runs-2 {
		t.Errorf("of %v runs %v cached and %v compressed", runs, hits, misses)
	}
	page := cached()
	page.ResourceVersion, page.Limit = "", many/2
	page.Query.LabelSelector = "node=node-0"
	if _, misses := compressed(t, l, "a page of what is selected", page); misses > 3 {
		t.Errorf("%v runs compressed that the whole list shares", misses)
	}
	partial := cached()
	partial.Query.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadataList"}
	if hits, _ := compressed(t, l, "metadata only", partial); hits != 0 {
		t.Errorf("%v runs shared with another encoding", hits)
	}
}

// A Table's rows are compressed with their cells, which may change although the objects do not.
func TestRunsOfRows(t *testing.T) {
	w, l := runsOf(t, 1<<20)
	table := cached()
	table.Query = fixture.Table(table.Query)
	_, runs := compressed(t, l, "the first", table)
	if hits, misses := compressed(t, l, "the same again", table); runs < 2 || hits != runs || misses != 0 {
		t.Errorf("of %v runs %v cached and %v compressed", runs, hits, misses)
	}
	w.Registry.Cell.Store(new("y"))
	for deadline := time.Now().Add(2 * time.Minute); ; {
		got := &body{ctx: t.Context()}
		table.Gzip = false
		if err := l.List(table, got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(got.data.Bytes(), []byte(`["x"]`)) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("rows without known ages are still cached")
		}
		time.Sleep(10 * time.Millisecond) // until the rows expire and registry prints them again
	}
	if hits, misses := compressed(t, l, "printed again", table); hits != 0 || misses != runs {
		t.Errorf("of %v runs %v cached and %v compressed", runs, hits, misses)
	}
}

// A small list is not compressed.
func TestSmallListsAreNotCompressed(t *testing.T) {
	_, l := runsOf(t, 1<<20)
	small := cached()
	small.Query.FieldSelector, small.Gzip = "metadata.name=pod-00001", true
	none := cached()
	none.Gzip = true
	_, off := runsOf(t, 0)
	for name, c := range map[string]struct {
		of *list.Server
		r  *watchfanoutv1.ListRequest
	}{"one object": {l, small}, "without a cache": {off, none}} {
		got := &body{ctx: t.Context()}
		if err := c.of.List(c.r, got); err != nil || got.gzip || got.size != int64(got.data.Len()) {
			t.Errorf("%s: gzip %v, %d bytes are reported as %d, %v", name, got.gzip, got.data.Len(), got.size, err)
		}
	}
}

// Concurrent clients share the compressed runs.
func TestRunsAreShared(t *testing.T) {
	_, l := runsOf(t, 1<<20)
	const clients = 8
	var all sync.WaitGroup
	for range clients {
		all.Go(func() {
			r := cached()
			r.Gzip = true
			if err := l.List(r, &body{ctx: t.Context()}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	together, _ := runRequests(t, l)
	runs, misses := compressed(t, l, "once more", cached())
	hits, all2 := runRequests(t, l)
	if misses != 0 || hits-runs+all2 != clients*runs || together < (clients-2)*runs {
		t.Errorf("%v runs: %v cached and %v compressed", runs, hits, all2)
	}
}

// A run that exceeds the limit is compressed again.
func TestRunsAreBounded(t *testing.T) {
	const limit = 40 << 10 * 8 / 7 // an eighth is for Tables
	_, l := runsOf(t, limit)
	compressed(t, l, "the first", cached())
	if held := gathered(t, l, "watershed_watchfanout_compressed_bytes")[""]; held > limit || held < limit/2 {
		t.Errorf("%v bytes are cached", held)
	}
	if _, misses := compressed(t, l, "the second", cached()); misses == 0 {
		t.Error("every run was cached")
	}
}

// Nothing is compressed for a client that has canceled.
func TestNothingIsCompressedForAGoneClient(t *testing.T) {
	_, l := runsOf(t, 1<<20)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := cached()
	r.Gzip = true
	err := l.List(r, &body{ctx: ctx})
	if _, misses := runRequests(t, l); err == nil || misses > 1 {
		t.Errorf("%v runs are compressed, %v", misses, err)
	}
}

// A run that hardly shrinks does not stay in the cache.
func TestNoiseIsNotCached(t *testing.T) {
	w, l := runsOf(t, 1<<20)
	noise := rand.NewChaCha8([32]byte{})
	for i := range 40 {
		data := make([]byte, 6<<10)
		_, _ = noise.Read(data)
		name := fmt.Sprintf("noise-%02d", i)
		o := fixture.Object(name, 30000+int64(i), "noise")
		o.Json = fmt.Appendf(o.Json[:len(o.Json)-1], `,"data":%q}`, base64.StdEncoding.EncodeToString(data))
		w.Cache.Apply(&logv1.Event{
			Type:            logv1.Type_TYPE_ADDED,
			Revision:        30000 + int64(i),
			StorageResource: "pods",
			Namespace:       "x",
			Name:            name,
			Epoch:           "h",
			Object:          o,
		})
	}
	r := cached()
	r.Query.LabelSelector = "node=noise"
	compressed(t, l, "noise", r)
	if held := gathered(t, l, "watershed_watchfanout_compressed_bytes")[""]; held > 0 {
		t.Errorf("%v bytes are cached", held)
	}
}

// firstChunkStream is a client that signals its first message.
type firstChunkStream struct {
	body
	first chan struct{}
	once  sync.Once
}

func (b *firstChunkStream) Send(c *watchfanoutv1.ListChunk) error {
	b.once.Do(func() { close(b.first) })
	return b.body.Send(c)
}

// The first message of a list is sent before any compression. Otherwise the gateway would time out and delegate a slow
// list to registry.
func TestAListBeginsBeforeItIsCompressed(t *testing.T) {
	_, l := runsOf(t, 1<<20)
	let := make(chan struct{})
	var holding, held sync.WaitGroup
	for range max(1, runtime.GOMAXPROCS(0)-1) { // occupies every compression slot
		held.Add(1)
		holding.Go(func() {
			_ = deflate.Turn(func() error { held.Done(); <-let; return nil })
		})
	}
	held.Wait()
	client := &firstChunkStream{body: body{ctx: t.Context()}, first: make(chan struct{})}
	holding.Go(func() {
		r := cached()
		r.Gzip = true
		if err := l.List(r, client); err != nil {
			t.Error(err)
		}
	})
	<-client.first
	close(let)
	holding.Wait()
}
