package lists_test

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
	commonv1 "watershed.dev/proto/watershed/common/v1"
	logv1 "watershed.dev/proto/watershed/log/v1"
	watchfanoutv1 "watershed.dev/proto/watershed/watchfanout/v1"
	"watershed.dev/services/watchfanout/internal/world"
	"watershed.dev/services/watchfanout/lists"
)

// many are enough pods for several runs.
const many = 6000

// runsOf are lists of a replica that holds many pods.
func runsOf(t *testing.T, limit int) (*world.World, *lists.Lists) {
	t.Helper()
	w := world.New(t)
	l := lists.New(w.Catalog, w.Cache, w.Log, w.Converter, limit)
	l.Seed(1)
	if _, err := ask(t, l, cached()); err != nil { // which has the resource loaded
		t.Fatal(err)
	}
	for i := range many {
		w.Apply(logv1.Type_TYPE_ADDED, 11+int64(i), fmt.Sprintf("pod-%05d", i), "node-0", "")
	}
	return w, l
}

// cached asks for what the replica has.
func cached() *watchfanoutv1.ListRequest {
	return &watchfanoutv1.ListRequest{Query: world.Query(), ResourceVersion: "0"}
}

// compressed asks for a list as gzip, and for the same as it is, and compares them. It answers how many of the runs had
// been kept, and how many were made.
func compressed(t *testing.T, l *lists.Lists, what string, r *watchfanoutv1.ListRequest) (kept, made float64) {
	t.Helper()
	r.Gzip = false
	as := &body{ctx: t.Context()}
	if err := l.List(r, as); err != nil {
		t.Fatal(what, err)
	}
	keptBefore, madeBefore := asked(t, l)
	r.Gzip = true
	got := &body{ctx: t.Context()}
	if err := l.List(r, got); err != nil {
		t.Fatal(what, err)
	}
	kept, made = asked(t, l)
	if got.size != as.size || !got.gzip {
		t.Errorf("%s: %d bytes are said to be %d, gzip %v", what, as.size, got.size, got.gzip)
	}
	from, err := gzip.NewReader(&got.data)
	if err != nil {
		t.Fatal(what, err)
	}
	plain, err := io.ReadAll(from)
	if err != nil {
		t.Fatal(what, err)
	}
	if !bytes.Equal(plain, as.data.Bytes()) {
		t.Fatalf("%s: %d bytes are not the %d of the list", what, len(plain), as.data.Len())
	}
	return kept - keptBefore, made - madeBefore
}

// asked is how many runs were asked for that were kept, and that were not.
func asked(t *testing.T, l *lists.Lists) (kept, made float64) {
	t.Helper()
	by := gathered(t, l, "watershed_watchfanout_compressed_runs_total")
	return by["true"], by["false"]
}

// gathered is what a metric says, by its label.
func gathered(t *testing.T, l *lists.Lists, name string) map[string]float64 {
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

// What is compressed is the list, and what has not changed is not compressed again.
func TestRuns(t *testing.T) {
	w, l := runsOf(t, 1<<20)
	kept, runs := compressed(t, l, "the first", cached())
	if kept != 0 || runs < 4 {
		t.Errorf("%v runs kept and %v made", kept, runs)
	}
	if kept, made := compressed(t, l, "the same again", cached()); kept != runs || made != 0 {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
	w.Apply(logv1.Type_TYPE_MODIFIED, 20000, "pod-03000", "node-1", "node-0")
	if _, made := compressed(t, l, "one changed", cached()); made != 1 {
		t.Errorf("%v runs made", made)
	}
	w.Apply(logv1.Type_TYPE_DELETED, 20001, "pod-00000", "node-0", "")
	if kept, made := compressed(t, l, "one gone", cached()); made > 2 || kept < runs-2 {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
	w.Apply(logv1.Type_TYPE_ADDED, 20002, "zzz", "node-0", "")
	if kept, made := compressed(t, l, "one at the end", cached()); made > 2 || kept < runs-2 {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
	page := cached()
	page.ResourceVersion, page.Limit = "", many/2
	page.Query.LabelSelector = "node=node-0"
	if _, made := compressed(t, l, "a page of what is selected", page); made > 3 {
		t.Errorf("%v runs made of those that it shares with the whole", made)
	}
	partial := cached()
	partial.Query.Output.As = &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "PartialObjectMetadataList"}
	if kept, _ := compressed(t, l, "metadata alone", partial); kept != 0 {
		t.Errorf("%v runs of the same objects in another form", kept)
	}
}

// A Table's rows are compressed as they are told: what they tell may change though their objects do not.
func TestRunsOfRows(t *testing.T) {
	w, l := runsOf(t, 1<<20)
	table := cached()
	table.Query = world.Table(table.Query)
	_, runs := compressed(t, l, "the first", table)
	if kept, made := compressed(t, l, "the same again", table); runs < 2 || kept != runs || made != 0 {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
	w.Registry.Cell.Store(new("y"))
	for deadline := time.Now().Add(10 * time.Second); ; {
		got := &body{ctx: t.Context()}
		table.Gzip = false
		if err := l.List(table, got); err != nil {
			t.Fatal(err)
		}
		if !bytes.Contains(got.data.Bytes(), []byte(`["x"]`)) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("rows that nobody says may be kept are kept")
		}
		time.Sleep(10 * time.Millisecond) // until it is asked again
	}
	if kept, made := compressed(t, l, "told anew", table); kept != 0 || made != runs {
		t.Errorf("of %v runs %v kept and %v made", runs, kept, made)
	}
}

// What is small is answered as it is.
func TestWhatIsNotCompressed(t *testing.T) {
	_, l := runsOf(t, 1<<20)
	small := cached()
	small.Query.FieldSelector, small.Gzip = "metadata.name=pod-00001", true
	none := cached()
	none.Gzip = true
	_, off := runsOf(t, 0)
	for what, c := range map[string]struct {
		of *lists.Lists
		r  *watchfanoutv1.ListRequest
	}{"one object": {l, small}, "where nothing is kept": {off, none}} {
		got := &body{ctx: t.Context()}
		if err := c.of.List(c.r, got); err != nil || got.gzip || got.size != int64(got.data.Len()) {
			t.Errorf("%s: gzip %v, %d bytes are said to be %d, %v", what, got.gzip, got.data.Len(), got.size, err)
		}
	}
}

// Those who ask at once share what is made.
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
	together, _ := asked(t, l)
	runs, made := compressed(t, l, "once more", cached())
	kept, all2 := asked(t, l)
	if made != 0 || kept-runs+all2 != clients*runs || together < (clients-2)*runs {
		t.Errorf("%v runs: %v kept and %v made", runs, kept, all2)
	}
}

// What does not fit in the bound is made again.
func TestRunsAreBounded(t *testing.T) {
	const limit = 40 << 10 * 8 / 7 // an eighth is for Tables
	_, l := runsOf(t, limit)
	compressed(t, l, "the first", cached())
	if held := gathered(t, l, "watershed_watchfanout_compressed_bytes")[""]; held > limit || held < limit/2 {
		t.Errorf("%v bytes are kept", held)
	}
	if _, made := compressed(t, l, "the second", cached()); made == 0 {
		t.Error("all was kept")
	}
}

// A client that has gone has nothing more compressed for it.
func TestNothingIsCompressedForNobody(t *testing.T) {
	_, l := runsOf(t, 1<<20)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	r := cached()
	r.Gzip = true
	err := l.List(r, &body{ctx: ctx})
	if _, made := asked(t, l); err == nil || made > 1 {
		t.Errorf("%v runs are made, %v", made, err)
	}
}

// What hardly shrinks does not take the room of what does.
func TestNoiseIsNotKept(t *testing.T) {
	w, l := runsOf(t, 1<<20)
	noise := rand.NewChaCha8([32]byte{})
	for i := range 40 {
		data := make([]byte, 6<<10)
		_, _ = noise.Read(data)
		name := fmt.Sprintf("noise-%02d", i)
		o := world.Object(name, 30000+int64(i), "noise")
		o.Json = fmt.Appendf(o.Json[:len(o.Json)-1], `,"data":%q}`, base64.StdEncoding.EncodeToString(data))
		w.Cache.Apply(&logv1.Event{
			Type: logv1.Type_TYPE_ADDED, Revision: 30000 + int64(i), StorageResource: "pods", Namespace: "x", Name: name,
			Epoch: "h", Object: o,
		})
	}
	r := cached()
	r.Query.LabelSelector = "node=noise"
	compressed(t, l, "noise", r)
	if held := gathered(t, l, "watershed_watchfanout_compressed_bytes")[""]; held > 0 {
		t.Errorf("%v bytes are kept", held)
	}
}

// begun is a client that says when it is sent something.
type begun struct {
	body
	first chan struct{}
	once  sync.Once
}

func (b *begun) Send(c *watchfanoutv1.ListChunk) error {
	b.once.Do(func() { close(b.first) })
	return b.body.Send(c)
}

// A list is answered at once, however long others compress: whoever waits for it would ask registry for what is slow.
func TestAListBeginsBeforeItIsCompressed(t *testing.T) {
	_, l := runsOf(t, 1<<20)
	let := make(chan struct{})
	var holding, held sync.WaitGroup
	for range max(1, runtime.GOMAXPROCS(0)-1) { // every turn
		held.Add(1)
		holding.Go(func() {
			_ = deflate.Turn(func() error { held.Done(); <-let; return nil })
		})
	}
	held.Wait()
	client := &begun{body: body{ctx: t.Context()}, first: make(chan struct{})}
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
