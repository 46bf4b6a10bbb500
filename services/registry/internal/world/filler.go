package world

import (
	"time"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/randfill"
)

// Filler fills objects of any type: with few names, so that lists hold some of the same, and some text besides.
func Filler(seed int64) *randfill.Filler {
	text := func(c randfill.Continue) string {
		return []string{"", "a", "b", "80", "/x", "kubernetes.io/y", c.String(5)}[c.Intn(7)]
	}
	return randfill.NewWithSeed(seed).NilChance(0.4).NumElements(0, 3).MaxDepth(14).Funcs(
		func(s *string, c randfill.Continue) { *s = text(c) },
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewQuantity(c.Int63n(3), resource.DecimalSI)
		},
		func(i *intstr.IntOrString, c randfill.Continue) {
			*i = []intstr.IntOrString{intstr.FromInt32(0), intstr.FromInt32(7), intstr.FromString("http")}[c.Intn(3)]
		},
		func(r *metav1.Time, c randfill.Continue) { *r = metav1.Time{Time: Times[c.Intn(4)]} },
		func(r *metav1.MicroTime, c randfill.Continue) { *r = metav1.MicroTime{Time: Times[c.Intn(4)]} },
		func(r *runtime.RawExtension, c randfill.Continue) {
			r.Raw = []byte([]string{`{}`, `{"a":1}`, `{"a":{"b":["c"]}}`}[c.Intn(3)])
		},
		func(o *runtime.Object, _ randfill.Continue) { *o = nil },
		func(o *any, c randfill.Continue) {
			*o = []any{nil, "a", int64(1), []any{"a"}, map[string]any{"a": "b"}}[c.Intn(5)]
		},
		func(j *apiextensions.JSON, c randfill.Continue) {
			*j = []apiextensions.JSON{nil, "a", int64(1), []any{"a"}, map[string]any{"a": "b"}}[c.Intn(5)]
		},
		func(m *metav1.TypeMeta, _ randfill.Continue) { *m = metav1.TypeMeta{} },
		func(m *[]metav1.ManagedFieldsEntry, _ randfill.Continue) { *m = nil },
	)
}

// Times are those that Filler chooses from: two, and two that are none. A client may send one with a zone.
var Times = []time.Time{time.Unix(1, 0), time.Unix(2, 0), {}, time.Time{}.Local()}
