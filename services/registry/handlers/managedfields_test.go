package handlers_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/managed"
)

func managers(o object) (all []string) {
	for _, m := range o.Metadata.ManagedFields {
		all = append(all, fmt.Sprintf("%s %s %s", m.Manager, m.Operation, m.FieldsV1.GetRawString()))
	}
	slices.Sort(all)
	return all
}

// managedFields records each manager's fields. Only a forced apply takes a field from another manager.
func TestManagedFields(t *testing.T) {
	fx := fixture.New(t)
	const apply = "application/apply-patch+yaml"
	managed := func(want ...string) func(*testing.T, object) {
		return func(t *testing.T, o object) {
			t.Helper()
			if got := managers(o); !slices.Equal(got, want) {
				t.Errorf("%q, not %q", got, want)
			}
		}
	}
	run(t, fx,
		write{verb: "create", userAgent: "kubectl/v1.36 (linux)", body: configMap("m", `},"data":{"a":"1"}`), code: 201,
			check: managed(`kubectl Update {"f:data":{".":{},"f:a":{}}}`)},
		write{
			verb:        "patch",
			name:        "m",
			query:       "fieldManager=one",
			contentType: apply,
			body:        configMap("m", `},"data":{"a":"2"}`),
			fails:       `409 Conflict Apply failed with 1 conflict: conflict with "kubectl" using v1: .data.a`,
		},
		write{verb: "patch", name: "m", query: "fieldManager=one&force=true", contentType: apply,
			body: configMap("m", `},"data":{"a":"2"}`), code: 200,
			check: managed(`kubectl Update {"f:data":{}}`, `one Apply {"f:data":{"f:a":{}}}`)},
		write{
			verb:        "patch",
			name:        "m",
			query:       "fieldManager=two",
			contentType: apply,
			body:        configMap("m", `},"data":{"b":"3"}`),
			code:        200,
			check:       data("a=2", "b=3"),
		},
		write{
			verb:        "patch",
			name:        "m",
			query:       "fieldManager=one",
			contentType: apply,
			body:        configMap("m", "}"),
			code:        200,
			check:       data("b=3"),
		}, // a field that its manager no longer applies is removed
	)
	// An object that is too large with its managedFields is stored without them.
	keys := map[string]string{}
	for i := range 22000 {
		keys[fmt.Sprintf("key-%032d", i)] = ""
	}
	large, err := json.Marshal(keys)
	if err != nil {
		t.Fatal(err)
	}
	run(t, fx, write{verb: "create", body: configMap("large", `},"data":`+string(large)), code: 201,
		check: func(t *testing.T, o object) {
			if len(o.Data) != len(keys) || len(o.Metadata.ManagedFields) != 0 {
				t.Errorf("%d keys, %d managers", len(o.Data), len(o.Metadata.ManagedFields))
			}
		}})
}

// Updates and patches that change only a text have the cached managedFields of the write before.
func TestWritesReuseManagedFields(t *testing.T) {
	fx := fixture.New(t)
	write := func(r *registryv1.WriteRequest) []byte {
		t.Helper()
		r.Name = "reused"
		resp, err := fx.Write(t.Context(), fixture.ConfigMaps, r, &fixture.Callbacks{})
		if err != nil {
			t.Fatal(err)
		}
		return resp.Body
	}
	cached := func() float64 {
		return testutil.ToFloat64(managed.Metrics()[0].(*prometheus.CounterVec).WithLabelValues("update", "true"))
	}
	last := write(&registryv1.WriteRequest{Verb: "create", Body: []byte(configMap("reused", `},"data":{"k":"0"}`))})
	for i, r := range []*registryv1.WriteRequest{
		{Verb: "patch", ContentType: "application/merge-patch+json", Body: []byte(`{"data":{"k":"1"}}`)},
		{Verb: "patch", ContentType: "application/merge-patch+json", Body: []byte(`{"data":{"k":"2"}}`)},
		{Verb: "patch", ContentType: "application/strategic-merge-patch+json", Body: []byte(`{"data":{"k":"3"}}`)},
		{Verb: "update"},
	} {
		if r.Verb == "update" {
			r.Body = bytes.Replace(last, []byte(`"k":"3"`), []byte(`"k":"4"`), 1)
		}
		before, want := cached(), min(float64(i), 1) // the first write computes them
		if last = write(r); cached()-before != want {
			t.Errorf("write %d: %v cached outcomes, want %v", i, cached()-before, want)
		}
	}
}
