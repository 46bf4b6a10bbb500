package admission

import (
	"context"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/informers/core"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
)

// pluginInformers are the informers of the plugins. Their pods and nodes lack the fields that NodeRestriction and the
// authorizers do not read (apiclient.Informers). Three plugins need whole objects:
//
//   - PodSecurity lists the pods of a namespace whose level changes. The list comes from the gateway.
//   - ResourceQuota gets the pod that owns a ResourceClaim for extended resources. With wholePods, the gateway has it.
//   - A policy may have a pod or a node as a parameter. ForResource has only informers whose age counts, so upstream
//     starts an informer for each other kind of parameters (k8s.io/apiserver/pkg/admission/plugin/policy/generic,
//     ensureParamsForPolicyLocked). Its client is a paramClient.
type pluginInformers struct {
	informers.SharedInformerFactory
	pods *podReader
}

func newPluginInformers(f informers.SharedInformerFactory, client kubernetes.Interface,
	wholePods bool) pluginInformers {
	return pluginInformers{f, &podReader{client, wholePods, make(chan struct{}, maxPodLists)}}
}

// trackedParameters are the resources of trackAges that may be parameters of a policy.
var trackedParameters = []string{"namespaces", "resourcequotas", "limitranges", "serviceaccounts"}

// ForResource implements informers.SharedInformerFactory.
func (p pluginInformers) ForResource(r schema.GroupVersionResource) (informers.GenericInformer, error) {
	if r.GroupVersion() == corev1.SchemeGroupVersion && slices.Contains(trackedParameters, r.Resource) {
		return p.SharedInformerFactory.ForResource(r)
	}
	return nil, fmt.Errorf("the informer of %s is not for parameters", r.Resource)
}

// Core implements informers.SharedInformerFactory.
func (p pluginInformers) Core() core.Interface {
	return coreGroup{p.SharedInformerFactory.Core(), p.pods}
}

type coreGroup struct {
	core.Interface
	pods *podReader
}

// V1 implements core.Interface.
func (g coreGroup) V1() coreinformers.Interface { return coreV1{g.Interface.V1(), g.pods} }

type coreV1 struct {
	coreinformers.Interface
	pods *podReader
}

// Pods implements coreinformers.Interface.
func (v coreV1) Pods() coreinformers.PodInformer { return podInformer{v.Interface.Pods(), v.pods} }

type podInformer struct {
	coreinformers.PodInformer
	pods *podReader
}

// Lister implements coreinformers.PodInformer.
func (i podInformer) Lister() corelisters.PodLister { return podLister{i.PodInformer.Lister(), i.pods} }

type podLister struct {
	corelisters.PodLister
	pods *podReader
}

// Pods implements corelisters.PodLister.
func (l podLister) Pods(namespace string) corelisters.PodNamespaceLister {
	return namespacedPods{l.PodLister.Pods(namespace), l.pods, namespace}
}

type namespacedPods struct {
	corelisters.PodNamespaceLister
	pods      *podReader
	namespace string
}

// Get implements corelisters.PodNamespaceLister. NodeRestriction rejects a kubelet's request for a pod without a node.
// The node authorizer has its own watch, and may have received the node earlier. Get therefore reads such a pod from
// the gateway. If the gateway has no pod or does not respond, Get returns the informer's result.
func (n namespacedPods) Get(name string) (*corev1.Pod, error) {
	if n.pods.whole {
		return n.pods.get(n.namespace, name)
	}
	pod, err := n.PodNamespaceLister.Get(name)
	if err == nil && pod.Spec.NodeName != "" {
		return pod, nil
	}
	if current, err := n.pods.get(n.namespace, name); err == nil {
		return current, nil
	}
	return pod, err
}

// List implements corelisters.PodNamespaceLister.
func (n namespacedPods) List(selector labels.Selector) ([]*corev1.Pod, error) {
	return n.pods.list(n.namespace, selector)
}

const (
	// podReadTimeout bounds a read of the gateway, because listers have no context. Upstream has the same bound for the
	// list and the evaluation of its pods (k8s.io/pod-security-admission/admission, defaultNamespacePodCheckTimeout).
	podReadTimeout = time.Second
	// maxPodLists is how many lists are read at a time.
	maxPodLists = 2
	// maxCheckedPods is how many pods of a namespace PodSecurity checks (defaultNamespaceMaxPodsToCheck).
	maxCheckedPods = 3000
	podsPerPage    = 500
)

// podReader reads whole pods from the gateway.
type podReader struct {
	client kubernetes.Interface
	// whole means that Get always reads the gateway.
	whole bool
	// slots is a semaphore of lists.
	slots chan struct{}
}

// get returns a whole pod.
func (r *podReader) get(namespace, name string) (*corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(context.Background(), podReadTimeout)
	defer cancel()
	return r.client.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
}

// list returns the pods of a namespace without their status and environment, which PodSecurity does not read. It reads
// them in pages, so that only a page is in memory with all fields. It reads maxCheckedPods at most. PodSecurity only
// counts the further pods, which are therefore repetitions of a placeholder.
func (r *podReader) list(namespace string, selector labels.Selector) (pods []*corev1.Pod, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), podReadTimeout)
	defer cancel()
	select {
	case r.slots <- struct{}{}:
		defer func() { <-r.slots }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	o := metav1.ListOptions{LabelSelector: selector.String(), Limit: podsPerPage}
	for {
		page, err := r.client.CoreV1().Pods(namespace).List(ctx, o)
		if err != nil {
			return nil, err
		}
		for i := range page.Items {
			pod := &page.Items[i]
			pod.ManagedFields, pod.Status = nil, corev1.PodStatus{}
			for _, containers := range [][]corev1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
				for i := range containers {
					containers[i].Env = nil
				}
			}
			pods = append(pods, pod)
		}
		if o.Continue = page.Continue; o.Continue == "" {
			return pods, nil
		}
		if len(pods) >= maxCheckedPods {
			if page.RemainingItemCount != nil {
				pods = append(pods, slices.Repeat([]*corev1.Pod{placeholder(pods)}, int(*page.RemainingItemCount))...)
			}
			return pods, nil
		}
	}
}

// placeholder returns a pod that PodSecurity checks after the pods. It first checks the pods without a controller and
// the first pod of each controller.
func placeholder(pods []*corev1.Pod) *corev1.Pod {
	for _, p := range pods {
		if c := metav1.GetControllerOfNoCopy(p); c != nil {
			return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{OwnerReferences: []metav1.OwnerReference{*c}}}
		}
	}
	return &corev1.Pod{}
}
