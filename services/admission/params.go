package admission

import (
	"context"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/client-go/dynamic"

	"watershed.dev/platform/apiclient"
)

// paramInitializer gives each policy plugin a paramClient. It runs after upstream's initializer.
type paramInitializer struct {
	client  dynamic.Interface
	cluster *apiclient.Cluster
}

// Initialize implements admission.PluginInitializer.
func (i paramInitializer) Initialize(plugin admission.Interface) {
	if w, ok := plugin.(initializer.WantsDynamicClient); ok {
		w.SetDynamicClient(&paramClient{
			Interface: i.client,
			cluster:   i.cluster,
			resources: map[schema.GroupVersionResource]*apiclient.ListWatch{},
		})
	}
}

// paramClient reads the parameters of a plugin's policies. Its informers follow etcd with lists while the event log
// stalls. The plugin has a single informer of a resource.
type paramClient struct {
	dynamic.Interface
	cluster *apiclient.Cluster

	mu        sync.Mutex
	resources map[schema.GroupVersionResource]*apiclient.ListWatch
}

// IsWatchListSemanticsUnSupported implements an interface of client-go, which then does not use watch lists
// (k8s.io/client-go/util/watchlist).
func (c *paramClient) IsWatchListSemanticsUnSupported() bool { return true }

// Resource implements dynamic.Interface.
func (c *paramClient) Resource(r schema.GroupVersionResource) dynamic.NamespaceableResourceInterface {
	c.mu.Lock()
	defer c.mu.Unlock()
	resource := c.Interface.Resource(r)
	if c.resources[r] == nil {
		c.resources[r] = apiclient.NewListWatch(resource, &unstructured.Unstructured{}, c.cluster)
	}
	return paramResource{resource, c.resources[r]}
}

type paramResource struct {
	dynamic.NamespaceableResourceInterface
	all *apiclient.ListWatch
}

// Namespace implements dynamic.NamespaceableResourceInterface. Informers of parameters read all namespaces.
func (r paramResource) Namespace(namespace string) dynamic.ResourceInterface {
	if namespace != metav1.NamespaceAll {
		return r.NamespaceableResourceInterface.Namespace(namespace)
	}
	return r
}

// List implements dynamic.ResourceInterface.
func (r paramResource) List(ctx context.Context, o metav1.ListOptions) (*unstructured.UnstructuredList, error) {
	list, err := r.all.List(ctx, o)
	if err != nil {
		return nil, err
	}
	return list.(*unstructured.UnstructuredList), nil
}

// Watch implements dynamic.ResourceInterface.
func (r paramResource) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	return r.all.Watch(ctx, o)
}
