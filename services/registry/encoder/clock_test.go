package encoder_test

import (
	"encoding/json"
	"fmt"
	"math/rand"
	"regexp"
	"testing"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/encoder"
	"watershed.dev/services/registry/internal/world"
	"watershed.dev/services/registry/storage"
	"watershed.dev/services/registry/verbs"
)

// timestamp is a time in an object's JSON, with or without microseconds.
var timestamp = regexp.MustCompile(`"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`)

// earlier is an object's JSON with all its times so much earlier.
func earlier(t *testing.T, body []byte, by time.Duration) []byte {
	t.Helper()
	return timestamp.ReplaceAllFunc(body, func(text []byte) []byte {
		layout := `"` + metav1.RFC3339Micro + `"`
		if len(text) == len(`"2006-01-02T15:04:05Z"`) {
			layout = `"` + time.RFC3339 + `"`
		}
		at, err := time.Parse(layout, string(text))
		if err != nil {
			t.Fatal(err)
		}
		return at.Add(-by).AppendFormat(nil, layout)
	})
}

// ages fills an object with times of all ages.
func ages(seed int64) *randfill.Filler {
	at := func(c randfill.Continue) time.Time {
		ago := []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour, 365 * 24 * time.Hour}[c.Intn(5)]
		return time.Now().Add(-ago - time.Duration(c.Intn(50))*ago/10).Truncate(time.Second)
	}
	return randfill.NewWithSeed(seed).NilChance(0.2).NumElements(0, 2).MaxDepth(12).Funcs(
		func(s *string, c randfill.Continue) {
			if *s = []string{"", "a", "b", c.String(5)}[c.Intn(4)]; c.Intn(100) == 0 {
				*s = []string{"7d", "5m ago"}[c.Intn(2)]
			}
		},
		func(q *resource.Quantity, c randfill.Continue) { *q = *resource.NewQuantity(c.Int63n(3), resource.DecimalSI) },
		func(i *intstr.IntOrString, _ randfill.Continue) { *i = intstr.FromInt32(7) },
		func(r *metav1.Time, c randfill.Continue) { *r = metav1.Time{Time: at(c)} },
		func(r *metav1.MicroTime, c randfill.Continue) { *r = metav1.MicroTime{Time: at(c)} },
		func(d *time.Duration, c randfill.Continue) { *d = time.Duration(c.Intn(100)) * time.Second },
		func(r *runtime.RawExtension, _ randfill.Continue) { r.Raw = []byte(`{}`) },
		func(o *runtime.Object, _ randfill.Continue) { *o = nil },
		func(o *any, _ randfill.Continue) { *o = nil },
		func(j *apiextensions.JSON, _ randfill.Continue) { *j = "a" },
		func(m *metav1.TypeMeta, _ randfill.Continue) { *m = metav1.TypeMeta{} },
		func(m *[]metav1.ManagedFieldsEntry, _ randfill.Continue) { *m = nil },
	)
}

// A row that is said to follow the clock by its ages alone does: whatever kind, whatever object, the row of the same
// object with all its times earlier is that row with its ages told of earlier times.
func TestWhatOfARowFollowsTheClock(t *testing.T) {
	w := world.New(t)
	kinds := 0
	for _, entry := range w.Resources.BuiltIn.Entries() {
		e, ok := w.Resources.BuiltIn.Endpoint(entry.Resource)
		if !ok || entry.StoredAs == "" || !entry.Table || entry.Resource.Subresource != "" {
			continue
		}
		st, err := w.Resources.Stored(t.Context(), entry.StoredAs)
		if err != nil {
			t.Fatal(err)
		}
		lasting := 0
		for seed := range int64(20) {
			if follows(t, e, st, seed) {
				lasting++
			}
		}
		if lasting > 0 {
			kinds++
		} else {
			t.Logf("no row of %s lasts", entry.StoredAs)
		}
	}
	if kinds < 45 {
		t.Errorf("rows of %d kinds last", kinds)
	}
}

// follows compares what is said of an object's row with the row of one that is earlier; it answers whether the row
// follows the clock by its ages alone, and has some.
func follows(t *testing.T, e *verbs.Endpoint, st *storage.Stored, seed int64) bool {
	t.Helper()
	obj := e.Storage.New()
	ages(seed).Fill(obj)
	versioned, err := e.UnsafeConvertor.ConvertToVersion(obj, st.Kind.GroupVersion())
	if err != nil {
		return false // what is random may be nothing that the version can say
	}
	body, err := json.Marshal(versioned)
	if err != nil {
		t.Fatal(e.Kind, err)
	}
	by := time.Duration(rand.New(rand.NewSource(seed)).Int63n(int64(20 * 24 * time.Hour))).Truncate(time.Second)
	for attempt := 0; ; attempt++ { // a second may pass between two rows
		row, clock := rowOf(t, e, st, body)
		want, _ := rowOf(t, e, st, earlier(t, body, by))
		if !clock.AgesOnly {
			return false
		}
		got, at := "", 0
		for _, a := range clock.Ages {
			got += row[at:a.Offset] + fmt.Sprintf("%q", duration.HumanDuration(time.Since(time.Unix(a.Since, 0))+by))
			at = int(a.Offset + a.Length)
		}
		got = string(earlier(t, []byte(got+row[at:]), by)) // some cells are times as they are
		if got == want {
			return len(clock.Ages) > 0
		}
		if attempt == 2 {
			t.Fatalf("%v, seed %d: %v earlier the row is\n%s, not\n%s; it was\n%s%v", e.Kind, seed, by, want, got, row, clock)
		}
	}
}

func rowOf(t *testing.T, e *verbs.Endpoint, st *storage.Stored, body []byte) (string, *registryv1.Clock) {
	t.Helper()
	resp, err := encoder.Encode(t.Context(), e, st, &registryv1.EncodeRequest{
		StoredAs:      e.Entry.StoredAs,
		Json:          [][]byte{body},
		IncludeObject: "None",
		Output: &registryv1.Output{
			MediaType: runtime.ContentTypeJSON,
			As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"},
		},
	})
	if err != nil || len(resp.Objects) != 1 || len(resp.Clocks) != 1 {
		t.Fatalf("%v: %v, %v", e.Kind, resp, err)
	}
	return string(resp.Objects[0]), resp.Clocks[0]
}
