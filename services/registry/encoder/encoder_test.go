package encoder_test

import (
	"encoding/json"
	"strings"
	"testing"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	"k8s.io/apimachinery/pkg/runtime"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/encoder"
	"watershed.dev/services/registry/internal/world"
	"watershed.dev/services/registry/storage"
	"watershed.dev/services/registry/verbs"
)

const (
	stored = "horizontalpodautoscalers.autoscaling"
	// hpa is an autoscaler as the log has it, in autoscaling/v2.
	hpa = `{"metadata":{"name":"h","namespace":"x"},"spec":{"scaleTargetRef":{"kind":"Deployment","name":"d"},` +
		`"minReplicas":1,"maxReplicas":5,"metrics":[{"type":"Resource","resource":{"name":"cpu",` +
		`"target":{"type":"Utilization","averageUtilization":50}}}]},"status":{"currentMetrics":null,"desiredReplicas":0}}`
)

func encode(t *testing.T, w *world.World, version, object string,
	output *registryv1.Output) (*registryv1.EncodeResponse, error) {
	t.Helper()
	e, st := endpoint(t, w, version)
	return encoder.Encode(t.Context(), e, st, &registryv1.EncodeRequest{
		StorageResource: stored,
		Json:            [][]byte{[]byte(object)},
		Output:          output,
		IncludeObject:   "Object",
	})
}

func endpoint(t *testing.T, w *world.World, version string) (*verbs.Endpoint, *storage.Stored) {
	t.Helper()
	e, err := w.Resources.Endpoint(t.Context(), &commonv1.Resource{
		Group:    "autoscaling",
		Version:  version,
		Resource: "horizontalpodautoscalers",
	})
	if err != nil {
		t.Fatal(err)
	}
	st, err := w.Resources.Stored(t.Context(), stored)
	if err != nil {
		t.Fatal(err)
	}
	return e, st
}

// What the log has is encoded in the version and form that are asked for, without apiVersion and kind.
func TestOtherVersionsAndRows(t *testing.T) {
	w := world.New(t)
	if _, st := endpoint(t, w, "v2"); st.Kind.Version != "v2" {
		t.Fatalf("autoscalers are stored in %s; the object above is in v2", st.Kind.Version)
	}
	resp, err := encode(t, w, "v1", hpa, &registryv1.Output{MediaType: runtime.ContentTypeJSON})
	if err != nil || len(resp.Objects) != 1 {
		t.Fatalf("%v, %v", resp, err)
	}
	if got := string(resp.Objects[0]); !strings.Contains(got, `"targetCPUUtilizationPercentage":50`) ||
		strings.Contains(got, "apiVersion\":\"autoscaling") {
		t.Errorf("%s", got)
	}
	resp, err = encode(t, w, "v1", hpa, &registryv1.Output{MediaType: runtime.ContentTypeProtobuf})
	var v1 autoscalingv1.HorizontalPodAutoscaler
	if err != nil || v1.Unmarshal(resp.Objects[0]) != nil || v1.Spec.MaxReplicas != 5 {
		t.Errorf("%+v, %v", v1, err)
	}
	resp, err = encode(t, w, "v2", hpa, &registryv1.Output{
		MediaType: runtime.ContentTypeJSON,
		As:        &commonv1.Kind{Group: "meta.k8s.io", Version: "v1", Kind: "Table"},
	})
	if err != nil {
		t.Fatal(err)
	}
	var columns []struct{ Name string }
	var row struct {
		Cells  []any
		Object struct{ APIVersion string }
	}
	if err := json.Unmarshal(resp.Columns, &columns); err != nil || columns[1].Name != "Reference" {
		t.Errorf("%s, %v", resp.Columns, err)
	}
	if err := json.Unmarshal(resp.Objects[0], &row); err != nil || len(row.Cells) != len(columns) ||
		row.Cells[1] != "Deployment/d" || row.Object.APIVersion != "autoscaling/v2" {
		t.Errorf("%s, %v", resp.Objects[0], err)
	}
	if _, err := encode(t, w, "v1", `{"spec":`, &registryv1.Output{MediaType: runtime.ContentTypeJSON}); err == nil {
		t.Error("half an object is encoded")
	}
}
