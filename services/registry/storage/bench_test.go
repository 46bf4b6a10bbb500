package storage_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/kubernetes/pkg/api/legacyscheme"

	"watershed.dev/services/registry/internal/fixture"
)

// podValue returns the etcd value of a pod with forty variables, as a client creates it: 8 KB of JSON.
func podValue(b *testing.B) []byte {
	b.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Name:        "a",
		Namespace:   "x",
		UID:         "d2719b9e-3f1e-4d2b-b3d3-6f6c9f9a8f10",
		Labels:      map[string]string{"app": "bench", "tier": "web"},
		Annotations: map[string]string{"note": strings.Repeat("n", 800)},
	}, Spec: corev1.PodSpec{Containers: []corev1.Container{{
		Name:  "c",
		Image: "registry.example/app:1.2.3",
		Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
			"cpu":    resource.MustParse("10m"),
			"memory": resource.MustParse("16Mi"),
		}},
	}}}}
	var fields strings.Builder
	for i := range 40 {
		name := fmt.Sprintf("VARIABLE_%d", i)
		p.Spec.Containers[0].Env = append(p.Spec.Containers[0].Env,
			corev1.EnvVar{Name: name, Value: fmt.Sprintf("a value of some length for variable %d", i)})
		fmt.Fprintf(&fields, `"k:{\"name\":\"%s\"}":{".":{},"f:name":{},"f:value":{}},`, name)
	}
	legacyscheme.Scheme.Default(p)
	now := metav1.Now()
	p.ManagedFields = []metav1.ManagedFieldsEntry{{
		Manager:    "bench",
		Operation:  metav1.ManagedFieldsOperationUpdate,
		APIVersion: "v1",
		Time:       &now,
		FieldsType: "FieldsV1",
		FieldsV1: metav1.NewFieldsV1(`{"f:metadata":{"f:labels":{".":{},"f:app":{},"f:tier":{}}},"f:spec":{"f:containers":` +
			`{"k:{\"name\":\"c\"}":{".":{},"f:env":{".":{},` + strings.TrimSuffix(fields.String(), ",") + `}}}}}`),
	}}
	encoder := legacyscheme.Codecs.EncoderForVersion(protobuf.NewSerializer(legacyscheme.Scheme, legacyscheme.Scheme),
		corev1.SchemeGroupVersion)
	value, err := runtime.Encode(encoder, p)
	if err != nil {
		b.Fatal(err)
	}
	return value
}

// BenchmarkRow measures the decoding of a pod and its encoding for the log.
func BenchmarkRow(b *testing.B) {
	st, _ := fixture.New(b).Resources.Storage.ByName("pods")
	value := podValue(b)
	b.ReportAllocs()
	for b.Loop() {
		row := st.Row(b.Context(), "/registry/pods/x/a", value, 7)
		if row.Unreadable != "" {
			b.Fatal(row.Unreadable)
		}
		b.SetBytes(int64(len(row.Json)))
	}
}
