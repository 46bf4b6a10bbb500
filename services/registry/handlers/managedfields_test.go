package handlers_test

import (
	"bytes"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/managed"
)

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
