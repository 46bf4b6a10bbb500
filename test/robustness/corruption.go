package main

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/client-go/kubernetes/scheme"
)

// corrupt writes unusual objects that kube-apiserver accepts in protobuf: strings that are not UTF-8, and a string that
// JSON escapes to six times its size. Watches of config maps must not be affected.
func (w *workload) corrupt(n int) {
	bad := string([]byte{0xff, 0xfe, byte(n)})
	name := fmt.Sprintf("corrupt-%d", n)
	secret := &corev1.Secret{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Secret"},
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		Type:       corev1.SecretType(bad),
		StringData: map[string]string{"x": "<"},
	}
	event := &corev1.Event{
		TypeMeta:       metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
		ObjectMeta:     metav1.ObjectMeta{Namespace: namespace, Name: name},
		Reason:         bad,
		Message:        bad,
		InvolvedObject: corev1.ObjectReference{Namespace: namespace, Name: bad, FieldPath: bad},
	}
	for path, obj := range map[string]runtime.Object{"secrets": secret, "events": event} {
		data, err := runtime.Encode(protobuf.NewSerializer(scheme.Scheme, scheme.Scheme), obj)
		if err == nil { // the response's status does not matter here
			_, _, _ = w.do(context.Background(), w.client(), "POST", "/api/v1/namespaces/"+namespace+"/"+path,
				runtime.ContentTypeProtobuf, string(data))
		}
	}
}
