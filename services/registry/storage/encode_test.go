package storage_test

import (
	"bytes"
	"encoding/json"
	"math/rand"
	"reflect"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"sigs.k8s.io/randfill"

	"watershed.dev/services/registry/storage"
)

// fieldSets are JSON of managedFields: as the server writes it, and in other forms.
var fieldSets = []string{
	`{}`,
	`{"f:data":{".":{},"f:k":{}}}`,
	`{"f:spec":{"f:containers":{"k:{\"name\":\"c\"}":{".":{},"f:env":{"k:{\"name\":\"A\\\\B\"}":{}}}}}}`,
	`{"v:\"x\"":{},"i:0":{}}`,
	"",
	"null",
	"\xa0",
	`{ "f:a": {} }`,
	`{"f:<a>":{}}`,
	`{"f:\u00e9":{}}`,
	`{"f:é":{}}`,
	"{\"f:\u2028\":{}}",
	`{"f:a":1}`,
	`{"fieldsV1":null}`,
}

// The JSON of random objects of all built-in kinds equals encoding/json's, and the objects are unchanged.
func TestMarshalJSONEqualsEncodingJSON(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	fill := randfill.NewWithSeed(1).NilChance(0.4).NumElements(0, 2).MaxDepth(12).Funcs(
		func(q *resource.Quantity, c randfill.Continue) {
			*q = *resource.NewQuantity(c.Int63n(3), resource.DecimalSI)
		},
		func(r *runtime.RawExtension, _ randfill.Continue) {
			r.Raw = []byte([]string{`{"fieldsV1":null}`, `{`}[random.Intn(20)/19])
		},
		func(o *runtime.Object, _ randfill.Continue) { *o = nil },
		func(m *metav1.TypeMeta, _ randfill.Continue) { *m = metav1.TypeMeta{} },
		func(f *metav1.FieldsV1, _ randfill.Continue) {
			f.SetRawBytes([]byte(fieldSets[random.Intn(len(fieldSets))]))
		})
	compared, spliced := 0, 0
	for kind := range legacyscheme.Scheme.AllKnownTypes() {
		for range 20 {
			obj, err := legacyscheme.Scheme.New(kind)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := meta.Accessor(obj); err != nil || kind.Version == runtime.APIVersionInternal {
				break
			}
			fill.Fill(obj)
			before := obj.DeepCopyObject()
			want, wantErr := json.Marshal(obj)
			got, err := storage.MarshalJSON(obj)
			if !bytes.Equal(got, want) || (err == nil) != (wantErr == nil) {
				t.Fatalf("%s:\n%s\n%v\nnot\n%s\n%v", kind, got, err, want, wantErr)
			}
			if !reflect.DeepEqual(obj, before) {
				t.Fatalf("%s has changed to %v", kind, obj)
			}
			compared++
			if strings.Contains(string(want), `"fieldsV1":{`) {
				spliced++
			}
		}
	}
	if compared < 1000 || spliced < 100 {
		t.Errorf("%d objects, %d with field sets", compared, spliced)
	}
}

// isFieldSet accepts only JSON that encoding/json leaves unchanged.
func FuzzFieldSets(f *testing.F) {
	for _, s := range append(fieldSets, `{"a":{}"b":{}}`, `{"a":{},}`, `{"a":{}}}`, `{"a":{}`, `{"a"}`, `{,}`, `{"\"":{}}`,
		strings.Repeat(`{"a":`, 2000)+"{}"+strings.Repeat("}", 2000)) {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if !storage.IsFieldSet(data) {
			return
		}
		if out, err := json.Marshal(json.RawMessage(data)); err != nil || !bytes.Equal(out, data) {
			t.Errorf("%q is %q, %v", data, out, err)
		}
	})
}
