package admission

import (
	"testing"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic/dynamicinformer"
	"k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/apiclient"
)

// Each plugin has a client of its own, whose informers list all namespaces through apiclient.ListWatch.
func TestParamClient(t *testing.T) {
	limits := schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "limits"}
	object := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "example.com/v1", "kind": "Limit",
		"metadata": map[string]any{"name": "l", "namespace": "x"}}}
	client := fake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(),
		map[schema.GroupVersionResource]string{limits: "LimitList"}, object)
	p := &paramClient{
		Interface: client,
		cluster:   &apiclient.Cluster{},
		resources: map[schema.GroupVersionResource]*apiclient.ListWatch{},
	}
	i := dynamicinformer.NewFilteredDynamicInformer(p, limits, "", 0, cache.Indexers{}, nil)
	go i.Informer().RunWithContext(t.Context())
	if !cache.WaitForCacheSync(t.Context().Done(), i.Informer().HasSynced) {
		t.Fatal("the informer does not synchronize")
	}
	if _, err := i.Lister().ByNamespace("x").Get("l"); err != nil {
		t.Error(err)
	}
	if len(p.resources) != 1 {
		t.Errorf("the resources are %v", p.resources)
	}
	if _, err := newPluginInformers(nil, nil, false).ForResource(limits); err == nil {
		t.Error("a policy uses an informer of the factory")
	}
}
