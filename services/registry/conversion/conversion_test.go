package conversion_test

import (
	"encoding/json"
	"strings"
	"testing"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	"k8s.io/apimachinery/pkg/runtime"

	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/conversion"
	"watershed.dev/services/registry/handlers"
	"watershed.dev/services/registry/internal/fixture"
	"watershed.dev/services/registry/storage"
)

const (
	hpaResource = "horizontalpodautoscalers.autoscaling"
	// hpa is an autoscaler as the event log contains it, in autoscaling/v2.
	hpa = `{"metadata":{"name":"h","namespace":"x"},"spec":{"scaleTargetRef":{"kind":"Deployment","name":"d"},` +
		`"minReplicas":1,"maxReplicas":5,"metrics":[{"type":"Resource","resource":{"name":"cpu",` +
		`"target":{"type":"Utilization","averageUtilization":50}}}]},"status":{"currentMetrics":null,` +
		`"desiredReplicas":0}}`
)

func encode(t *testing.T, fx *fixture.Fixture, version, object string,
	output *registryv1.Output) (*registryv1.EncodeResponse, error) {
	t.Helper()
	scope, st := requestScope(t, fx, version)
	return conversion.Encode(t.Context(), scope, st, &registryv1.EncodeRequest{
		StorageResource: hpaResource,
		Json:            [][]byte{[]byte(object)},
		Output:          output,
		IncludeObject:   "Object",
	})
}

func requestScope(t *testing.T, fx *fixture.Fixture, version string) (*handlers.RequestScope, *storage.Resource) {
	t.Helper()
	scope, err := fx.Resources.RequestScope(t.Context(), &commonv1.Resource{
		Group:    "autoscaling",
		Version:  version,
		Resource: "horizontalpodautoscalers",
	})
	if err != nil {
		t.Fatal(err)
	}
	st, err := fx.Resources.StorageResource(t.Context(), hpaResource)
	if err != nil {
		t.Fatal(err)
	}
	return scope, st
}

// Encode returns objects of the event log in the requested version and format, without apiVersion and kind.
func TestOtherVersionsAndRows(t *testing.T) {
	fx := fixture.New(t)
	if _, st := requestScope(t, fx, "v2"); st.Kind.Version != "v2" {
		t.Fatalf("autoscalers are stored in %s; the object above is in v2", st.Kind.Version)
	}
	resp, err := encode(t, fx, "v1", hpa, &registryv1.Output{MediaType: runtime.ContentTypeJSON})
	if err != nil || len(resp.Objects) != 1 {
		t.Fatalf("%v, %v", resp, err)
	}
	if got := string(resp.Objects[0]); !strings.Contains(got, `"targetCPUUtilizationPercentage":50`) ||
		strings.Contains(got, "apiVersion\":\"autoscaling") {
		t.Errorf("%s", got)
	}
	resp, err = encode(t, fx, "v1", hpa, &registryv1.Output{MediaType: runtime.ContentTypeProtobuf})
	var v1 autoscalingv1.HorizontalPodAutoscaler
	if err != nil || v1.Unmarshal(resp.Objects[0]) != nil || v1.Spec.MaxReplicas != 5 {
		t.Errorf("%+v, %v", v1, err)
	}
	resp, err = encode(t, fx, "v2", hpa, &registryv1.Output{
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
	if _, err := encode(t, fx, "v1", `{"spec":`, &registryv1.Output{MediaType: runtime.ContentTypeJSON}); err == nil {
		t.Error("an incomplete object is encoded")
	}
}
