package authn

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A tenant's large objects take little of authn's memory, and their tokens are still accepted.
func TestCachedObjectsAreSmall(t *testing.T) {
	large := strings.Repeat("x", 500_000)
	dates := map[string]string{
		"kubernetes.io/legacy-token-last-used":     "2026-01-02",
		"kubernetes.io/legacy-token-invalid-since": "2026-01-03",
	}
	labels := maps.Clone(dates)
	for i := range 10_000 {
		labels[fmt.Sprint("large", i)] = "v"
	}
	meta := metav1.ObjectMeta{Name: "n", Namespace: "t", UID: "u", ResourceVersion: "7", GenerateName: large,
		Labels: labels, Annotations: map[string]string{"large": large}}
	for _, obj := range []any{
		&corev1.ServiceAccount{ObjectMeta: meta, Secrets: []corev1.ObjectReference{
			{Name: "legacy", FieldPath: large}, {Name: large}}},
		&corev1.ServiceAccount{ObjectMeta: meta, Secrets: make([]corev1.ObjectReference, 50_000)},
		&corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{"token": []byte("known"), "large": []byte(large)}},
		&corev1.Secret{ObjectMeta: meta, Data: map[string][]byte{"token": []byte(large)}},
	} {
		trim(obj)
		text, err := json.Marshal(obj)
		if err != nil || len(text) > 1500 {
			t.Errorf("%T has %d bytes, %v", obj, len(text), err)
		}
		m := obj.(metav1.Object)
		if m.GetUID() != "u" || m.GetResourceVersion() != "7" {
			t.Errorf("%T lost its metadata: %s", obj, text)
		}
		if a, ok := obj.(*corev1.ServiceAccount); ok && len(a.Secrets) < maxSecrets &&
			!slices.Equal(a.Secrets, []corev1.ObjectReference{{Name: "legacy"}}) {
			t.Errorf("the names of its Secrets are %v", a.Secrets)
		}
		s, ok := obj.(*corev1.Secret)
		if ok && len(s.Data) > 0 && string(s.Data["token"]) != "known" {
			t.Errorf("the token is %q", s.Data["token"])
		}
		if ok && !maps.Equal(s.Labels, dates) {
			t.Errorf("the Secret has the labels %v", s.Labels)
		}
	}
}
