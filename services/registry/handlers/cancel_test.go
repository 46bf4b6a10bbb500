package handlers

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/scheme"
)

// A strategic merge ends with its request, at the latest between two lists. Until then it merges as upstream does.
func TestStrategicMergeIsCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	pod := func(image string) map[string]any {
		return map[string]any{"spec": map[string]any{"containers": []any{map[string]any{"name": "c", "image": image}}}}
	}
	out, err := strategicMerge(ctx, pod("a"), pod("b"), &corev1.Pod{})
	if fmt.Sprint(out) != fmt.Sprint(pod("b")) || err != nil {
		t.Errorf("%v, %v", out, err)
	}
	cancel()
	if _, err := strategicMerge(ctx, pod("a"), pod("b"), &corev1.Pod{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after its request has ended: %v", err)
	}
}

// Encoding a list ends with its request. An object that was written is encoded in any case.
func TestListEncodingIsCanceled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	encoder := scheme.Codecs.LegacyCodec(corev1.SchemeGroupVersion)
	for obj, c := range map[runtime.Object]bool{
		&corev1.ConfigMap{}: false,
		&corev1.ConfigMapList{Items: []corev1.ConfigMap{{}, {}}}: true,
	} {
		err := encoder.Encode(obj, &cancelableBuffer{ctx: ctx, list: c})
		if errors.Is(err, context.Canceled) != c {
			t.Errorf("%T: %v", obj, err)
		}
	}
}
