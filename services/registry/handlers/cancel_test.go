package handlers

import (
	"context"
	"errors"
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
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

// A patch with a list that takes too long to merge is rejected. kube-apiserver merges it for minutes.
func TestALongStrategicMergeIsRejected(t *testing.T) {
	owners := func(n int) map[string]any {
		list := make([]any, n)
		for i := range list {
			list[i] = map[string]any{"uid": fmt.Sprint(i)}
		}
		return map[string]any{"metadata": map[string]any{"ownerReferences": list}}
	}
	if _, err := strategicMerge(t.Context(), owners(1000), owners(1000), &corev1.ConfigMap{}); err != nil {
		t.Error(err)
	}
	if _, err := strategicMerge(t.Context(), owners(1), owners(16000), &corev1.ConfigMap{}); err == nil ||
		!apierrors.IsRequestEntityTooLargeError(strategicError(err)) {
		t.Errorf("a long list: %v", err)
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

// A list that is longer than its bound is not encoded to its end.
func TestALongListIsNotEncoded(t *testing.T) {
	list := &corev1.ConfigMapList{Items: make([]corev1.ConfigMap, 10)}
	encoder := scheme.Codecs.LegacyCodec(corev1.SchemeGroupVersion)
	for most, want := range map[int]error{1 << 20: nil, 100: errLongList} {
		buf := &cancelableBuffer{ctx: t.Context(), list: true, most: most}
		if err := encoder.Encode(list, buf); !errors.Is(err, want) || buf.Len() > most {
			t.Errorf("at most %d bytes: %d bytes, %v", most, buf.Len(), err)
		}
	}
}
