package authn

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// A tenant's large objects take little of authn's memory, and their tokens are still accepted.
func TestCachedObjectsAreSmall(t *testing.T) {
	large := strings.Repeat("x", 500_000)
	meta := metav1.ObjectMeta{Name: "n", Namespace: "t", UID: "u", ResourceVersion: "7",
		Labels: map[string]string{"a": "b"}, Annotations: map[string]string{"large": large}}
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
		if m.GetUID() != "u" || m.GetResourceVersion() != "7" || m.GetLabels()["a"] != "b" {
			t.Errorf("%T lost its metadata: %s", obj, text)
		}
		if a, ok := obj.(*corev1.ServiceAccount); ok && len(a.Secrets) < maxSecrets &&
			!slices.Equal(a.Secrets, []corev1.ObjectReference{{Name: "legacy"}}) {
			t.Errorf("the names of its Secrets are %v", a.Secrets)
		}
		if s, ok := obj.(*corev1.Secret); ok && len(s.Data) > 0 && string(s.Data["token"]) != "known" {
			t.Errorf("the token is %q", s.Data["token"])
		}
	}
}
