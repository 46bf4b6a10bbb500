package e2e

import (
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

var (
	everything   = labels.Everything()
	informerType = reflect.TypeFor[*corev1.ConfigMap]()
)

func clientFor(t *testing.T, c *rest.Config) *kubernetes.Clientset {
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	return client
}
