package conversion_test

import (
	"encoding/json"
	"math/rand"
	"reflect"
	"regexp"
	"strings"
	"testing"
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	"k8s.io/apiextensions-apiserver/pkg/registry/customresource/tableconvertor"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/conversion"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/storage"
)

// timestampPattern matches a time in an object's JSON, with or without microseconds.
var timestampPattern = regexp.MustCompile(`"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z"`)

// earlier returns an object's JSON with all its times moved back.
func earlier(t *testing.T, body []byte, by time.Duration) []byte {
	t.Helper()
	return timestampPattern.ReplaceAllFunc(body, func(text []byte) []byte {
		layout := `"` + metav1.RFC3339Micro + `"`
		if len(text) == len(`"2006-01-02T15:04:05Z"`) {
			layout = `"` + time.RFC3339 + `"`
		}
		ts, err := time.Parse(layout, string(text))
		if err != nil {
			t.Fatal(err)
		}
		return ts.Add(-by).AppendFormat(nil, layout)
	})
}

// filler fills an object with times of different ages.
func filler(seed int64) *randfill.Filler {
	randomTime := func(c randfill.Continue) time.Time {
		ago := []time.Duration{time.Second, time.Minute, time.Hour, 24 * time.Hour, 365 * 24 * time.Hour}[c.Intn(5)]
		return time.Now().Add(-ago - time.Duration(c.Intn(50))*ago/10).Truncate(time.Second)
	}
	return randfill.NewWithSeed(seed).NilChance(0.2).NumElements(0, 2).MaxDepth(12).Funcs(
		func(s *string, c randfill.Continue) {
			if *s = []string{"", "a", "b", c.String(5)}[c.Intn(4)]; c.Intn(100) == 0 {
				*s = []string{"7d", "5m ago"}[c.Intn(2)]
			}
		},
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewQuantity(c.Int63n(3), resource.DecimalSI)
		},
		func(i *intstr.IntOrString, _ randfill.Continue) { *i = intstr.FromInt32(7) },
		func(r *metav1.Time, c randfill.Continue) { *r = metav1.Time{Time: randomTime(c)} },
		func(r *metav1.MicroTime, c randfill.Continue) { *r = metav1.MicroTime{Time: randomTime(c)} },
		func(d *time.Duration, c randfill.Continue) { *d = time.Duration(c.Intn(100)) * time.Second },
		func(r *runtime.RawExtension, _ randfill.Continue) { r.Raw = []byte(`{}`) },
		func(o *runtime.Object, _ randfill.Continue) { *o = nil },
		func(o *any, _ randfill.Continue) { *o = nil },
		func(j *apiextensions.JSON, _ randfill.Continue) { *j = "a" },
		func(m *metav1.TypeMeta, _ randfill.Continue) { *m = metav1.TypeMeta{} },
		func(m *[]metav1.ManagedFieldsEntry, _ randfill.Continue) { *m = nil },
	)
}

// seeds is the number of random objects of each kind.
const seeds = 20

// A row with complete ages follows the clock only in these ages, for every kind and any object. If all times of the
// object are earlier, only the marked ages differ.
func TestRowAgesFollowTheClock(t *testing.T) {
	fx := fixture.New(t)
	kinds := 0
	for _, apiResource := range fx.Resources.BuiltIn.APIResources() {
		scope, ok := fx.Resources.BuiltIn.RequestScope(apiResource.Resource)
		if !ok || apiResource.StorageResource == "" || !apiResource.Table || apiResource.Resource.Subresource != "" {
			continue
		}
		st, err := fx.Resources.StorageResource(t.Context(), apiResource.StorageResource)
		if err != nil {
			t.Fatal(err)
		}
		lasting := 0
		for seed := range int64(seeds) {
			if followsClock(t, scope, st, seed) {
				lasting++
			}
		}
		if lasting > 0 {
			kinds++
		} else {
			t.Logf("no row of %s has complete ages", apiResource.StorageResource)
		}
	}
	if kinds < 45 {
		t.Errorf("rows of %d kinds have complete ages", kinds)
	}
}

// followsClock compares an object's row with the row of an earlier object. It returns whether the ages of the row are
// complete and not empty.
func followsClock(t *testing.T, scope *handlers.RequestScope, st *storage.Resource, seed int64) bool {
	t.Helper()
	obj := scope.Storage.New()
	filler(seed).Fill(obj)
	versioned, err := scope.UnsafeConvertor.ConvertToVersion(obj, st.Kind.GroupVersion())
	if err != nil {
		return false // the version cannot represent every random object
	}
	body, err := json.Marshal(versioned)
	if err != nil {
		t.Fatal(scope.Kind, err)
	}
	by := time.Duration(rand.New(rand.NewSource(seed)).Int63n(int64(20 * 24 * time.Hour))).Truncate(time.Second)
	for attempt := 0; ; attempt++ { // a second may pass between two rows
		row, ages := rowOf(t, scope, st, body)
		want, _ := rowOf(t, scope, st, earlier(t, body, by))
		if !ages.Complete {
			return false
		}
		got, offset := "", 0
		for _, a := range ages.Ages {
			got += row[offset:a.Offset] + duration.HumanDuration(time.Since(time.Unix(a.Seconds, int64(a.Nanos)))+by)
			offset = int(a.Offset + a.Length)
		}
		got = string(earlier(t, []byte(got+row[offset:]), by)) // some cells are times
		if got == want {
			return len(ages.Ages) > 0
		}
		if attempt == 2 {
			t.Fatalf("%v, seed %d: %v earlier the row is\n%s, not\n%s; it was\n%s%v",
				scope.Kind, seed, by, want, got, row, ages)
		}
	}
}

// The most important ages are found: of restarted pods, Jobs, CronJobs and Events.
func TestAgesAreFound(t *testing.T) {
	fx := fixture.New(t)
	ago := func(d time.Duration) string { return time.Now().Add(-d).UTC().Format(time.RFC3339) }
	const created = `{"metadata":{"name":"a","namespace":"x","creationTimestamp":"`
	started := func(restarted string) string {
		return `{"name":"c","restartCount":2,"ready":true,"image":"","imageID":"",` +
			`"lastState":{"terminated":{"exitCode":1,"finishedAt":"` + restarted + `"}}}`
	}
	for stored, c := range map[string]struct {
		body string
		ages int
	}{
		"pods": {created + ago(72*time.Hour) + `"},"spec":{"containers":[{"name":"c"},{"name":"d"}]},` +
			`"status":{"startTime":"` + ago(72*time.Hour) + `","containerStatuses":[` +
			started(ago(3*time.Hour)) + `,` + started(ago(25*time.Minute)) + `]}}`, 2},
		"jobs.batch": {created + ago(72*time.Hour) + `"},"spec":{"template":{}},"status":{"startTime":"` +
			ago(72*time.Hour) + `","completionTime":"` + ago(71*time.Hour) + `"}}`, 1},
		"cronjobs.batch": {created + ago(72*time.Hour) + `"},"spec":{"schedule":"@daily"},` +
			`"status":{"lastScheduleTime":"` + ago(25*time.Minute) + `"}}`, 2},
		"events": {created + ago(72*time.Hour) + `"},"firstTimestamp":"` + ago(72*time.Hour) +
			`","lastTimestamp":"` + ago(25*time.Minute) + `","involvedObject":{},"reportingComponent":""}`, 2},
	} {
		st, err := fx.Resources.StorageResource(t.Context(), stored)
		if err != nil {
			t.Fatal(err)
		}
		name, group, _ := strings.Cut(stored, ".")
		scope, err := fx.Resources.RequestScope(t.Context(), &commonv1.Resource{
			Group: group, Version: st.Kind.Version, Resource: name,
		})
		if err != nil {
			t.Fatal(err)
		}
		row, ages := rowOf(t, scope, st, []byte(c.body))
		if !ages.Complete || len(ages.Ages) != c.ages {
			t.Errorf("%s: %s of %v", stored, row, ages)
		}
		for _, a := range ages.Ages {
			if word := row[a.Offset:][:a.Length]; word != duration.HumanDuration(time.Since(time.Unix(a.Seconds, 0))) {
				t.Errorf("%s: %q is marked as the age of %v", stored, word, time.Unix(a.Seconds, 0))
			}
		}
	}
}

// In the row of a custom resource, the ages of date columns are found among many times. No other cell is marked.
func TestAgesOfCustomResources(t *testing.T) {
	convertor, err := tableconvertor.New([]apiextensionsv1.CustomResourceColumnDefinition{
		{Name: "Renewed", Type: "date", JSONPath: ".status.renewed"},
		{Name: "Period", Type: "string", JSONPath: ".spec.period"},
		{Name: "Age", Type: "date", JSONPath: ".metadata.creationTimestamp"},
	})
	if err != nil {
		t.Fatal(err)
	}
	ago := func(d time.Duration) string { return time.Now().Add(-d).UTC().Format(time.RFC3339Nano) }
	times := func(n int) (all []any) {
		for i := range n {
			all = append(all, ago(45*24*time.Hour+time.Duration(i)*time.Minute))
		}
		return all
	}
	for desc, c := range map[string]struct {
		name, period, renewed string
		times                 []any
		ages                  int
		complete              bool
	}{
		"a date":                     {"5m", "5m", ago(5*time.Minute + 200*time.Millisecond), nil, 2, true},
		"constants like recentAge":   {"60s", "60s", ago(60*time.Second + 200*time.Millisecond), nil, 2, true},
		"many of the same age":       {"a", "45d", ago(45*24*time.Hour + 10*time.Second), times(100), 2, true},
		"more than maxTimestamps":    {"a", "a", ago(time.Hour), times(1000), 0, false},
		"a duration beside a date":   {"a", "1h (5m ago)", ago(5*time.Minute + 200*time.Millisecond), nil, 2, true},
		"an invalid date":            {"a", "a", "yesterday", nil, 1, true},
		"an hour of one digit":       {"a", "a", "2020-01-02T3:04:05Z", nil, 2, true},
		"a long fraction":            {"a", "a", "2020-01-02T03:04:05.0000000000000000000001Z", nil, 2, true},
		"a future date":              {"a", "a", ago(-24 * time.Hour), nil, 2, true},
		"long words and many spaces": {"a", strings.Repeat(" ,7d7d7d7d7d7d7d7d7d", 1000), ago(time.Hour), nil, 2, true},
	} {
		u := &unstructured.Unstructured{Object: map[string]any{
			"metadata": map[string]any{"name": c.name, "creationTimestamp": ago(45 * 24 * time.Hour)},
			"spec":     map[string]any{"period": c.period},
			"status":   map[string]any{"renewed": c.renewed, "times": c.times},
		}}
		from, before := time.Now(), u.DeepCopy()
		table, err := convertor.ConvertToTable(t.Context(), u, nil)
		if err != nil {
			t.Fatal(err)
		}
		data, ages, err := conversion.EncodeRow(t.Context(), convertor, u, &table.Rows[0], from)
		if err != nil || ages.Complete != c.complete || len(ages.Ages) != c.ages {
			t.Errorf("%s: %s of %v, %v", desc, data, ages, err)
		}
		if !reflect.DeepEqual(u, before) {
			t.Errorf("%s: the object is %v, want %v", desc, u, before)
		}
	}
}

func rowOf(
	t *testing.T,
	scope *handlers.RequestScope,
	st *storage.Resource,
	body []byte,
) (string, *registryv1.RowAges) {
	t.Helper()
	resp, err := conversion.Encode(t.Context(), scope, st, &registryv1.EncodeRequest{
		StorageResource: scope.APIResource.StorageResource,
		Json:            [][]byte{body},
		IncludeObject:   "None",
		Output: &registryv1.Output{
			MediaType: runtime.ContentTypeJSON,
			As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"},
		},
	})
	if err != nil || len(resp.Objects) != 1 || len(resp.RowAges) != 1 {
		t.Fatalf("%v: %v, %v", scope.Kind, resp, err)
	}
	return string(resp.Objects[0]), resp.RowAges[0]
}
