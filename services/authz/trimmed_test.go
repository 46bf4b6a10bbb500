package authz

import (
	"fmt"
	"math/rand"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/plugin/pkg/auth/authorizer/node"

	"watershed.dev/platform/apiclient"
)

// The node authorizer derives the same permissions from the pods of apiclient's informers as from whole pods. The pods
// have all fields, with random content.
func TestTrimmedPodsGrantTheSamePermissions(t *testing.T) {
	random := fuzzer.FuzzerFor(metafuzzer.Funcs, rand.NewSource(1), legacyscheme.Codecs)
	whole, trimmed := node.NewGraph(), node.NewGraph()
	for i := range 200 {
		pod := &corev1.Pod{}
		random.Fill(pod)
		pod.Name, pod.Namespace, pod.ResourceVersion = fmt.Sprint("p", i), "x", "1"
		pod.Spec.NodeName = fmt.Sprint("n", i%3)
		if i%5 == 0 {
			pod.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "m"}
		}
		f := apiclient.Informers(fake.NewClientset(pod.DeepCopy()))
		pods := f.Core().V1().Pods().Lister()
		f.Start(t.Context().Done())
		f.WaitForCacheSync(t.Context().Done())
		got, err := pods.Pods("x").Get(pod.Name)
		if err != nil {
			t.Fatal(err)
		}
		if got.Status.Phase != "" {
			t.Fatal("the informer's pod is whole")
		}
		whole.AddPod(pod)
		trimmed.AddPod(got)
	}
	if !reflect.DeepEqual(whole, trimmed) {
		t.Error("the graphs differ")
	}
	if reflect.DeepEqual(whole, node.NewGraph()) {
		t.Error("the graph is empty")
	}
}
