package admission

import (
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"watershed.dev/platform/apiclient"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
)

// A namespace's new level is compared with the whole pods of the namespace, although the informer's pods lack fields.
func TestPodSecurityReadsWholePods(t *testing.T) {
	a := chain(t, cluster{"/api/v1/namespaces/x/pods": {`{"metadata":{"name":"p","namespace":"x"},
		"spec":{"containers":[{"name":"c","image":"i","securityContext":{"privileged":true}}]}}`}})
	namespace := func(level string) string {
		return `{"apiVersion":"v1","kind":"Namespace","metadata":{"name":"x","labels":{` +
			`"pod-security.kubernetes.io/enforce":"` + level + `"}}}`
	}
	r := creationOf("Namespace", "namespaces", "x", namespace("baseline"))
	r.Operation, r.Name, r.OldObject = admissionv1.Operation_OPERATION_UPDATE, "x", []byte(namespace("privileged"))
	v, err := a.Validate(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(v.Warnings, "p: privileged") {
		t.Errorf("the warnings are %q", v.Warnings)
	}
}

// The informer serves NodeRestriction. The gateway serves lists, and the quota of ResourceClaims.
func TestPluginInformers(t *testing.T) {
	client := fake.NewClientset(&corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "x"},
		Spec: corev1.PodSpec{
			NodeName:   "n",
			Containers: []corev1.Container{{Name: "c", Env: []corev1.EnvVar{{Name: "A"}}}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodRunning},
	})
	f := apiclient.Informers(client)
	pods := newPluginInformers(f, client, false).Core().V1().Pods().Lister().Pods("x")
	whole := newPluginInformers(f, client, true).Core().V1().Pods().Lister().Pods("x")
	f.Start(t.Context().Done())
	f.WaitForCacheSync(t.Context().Done())
	if p, err := pods.Get("p"); err != nil || p.Spec.NodeName != "n" || len(p.Spec.Containers) > 0 {
		t.Errorf("NodeRestriction's pod is %v, %v", p, err)
	}
	if p, err := whole.Get("p"); err != nil || p.Status.Phase != corev1.PodRunning || len(p.Spec.Containers) != 1 {
		t.Errorf("the quota's pod is %v, %v", p, err)
	}
	all, err := pods.List(labels.Everything())
	if err != nil || len(all) != 1 || len(all[0].Spec.Containers) != 1 || all[0].Spec.Containers[0].Env != nil ||
		all[0].Status.Phase != "" {
		t.Errorf("the list is %v, %v", all, err)
	}
}

// PodSecurity checks a bounded number of pods, and counts all pods of the namespace.
func TestPodListsEndWithTheCheckedPods(t *testing.T) {
	client := fake.NewClientset()
	const total = maxCheckedPods + 2*podsPerPage
	pages := 0
	client.PrependReactor("list", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		pages++
		remaining := int64(total - pages*podsPerPage)
		list := &corev1.PodList{ListMeta: metav1.ListMeta{Continue: "next", RemainingItemCount: &remaining}}
		for i := range podsPerPage {
			list.Items = append(list.Items, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint(pages, "-", i)}})
		}
		yes := true
		list.Items[0].OwnerReferences = []metav1.OwnerReference{{UID: "owner", Controller: &yes}}
		return true, list, nil
	})
	f := newPluginInformers(apiclient.Informers(client), client, false)
	all, err := f.Core().V1().Pods().Lister().Pods("x").List(labels.Everything())
	if err != nil || len(all) != total || pages != maxCheckedPods/podsPerPage {
		t.Fatalf("%d pods of %d pages, %v", len(all), pages, err)
	}
	last := all[maxCheckedPods:]
	if all[maxCheckedPods-1].Name == "" || last[0].Name != "" || metav1.GetControllerOf(last[0]).UID != "owner" {
		t.Errorf("the first pod that is only counted is %v", last[0])
	}
}

// A pod that the informer lacks, or has without a node, is read from the gateway.
func TestAPodWithoutNodeIsReadAgain(t *testing.T) {
	pod := func(name, node string) *corev1.Pod {
		return &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "x"},
			Spec:       corev1.PodSpec{NodeName: node},
		}
	}
	f := apiclient.Informers(fake.NewClientset())
	store := f.Core().V1().Pods().Informer().GetStore()
	for _, p := range []*corev1.Pod{pod("bound", "n"), pod("unbound", "")} {
		if err := store.Add(p); err != nil {
			t.Fatal(err)
		}
	}
	client := fake.NewClientset(pod("bound", "other"), pod("unbound", "n"), pod("new", "n"))
	pods := newPluginInformers(f, client, false).Core().V1().Pods().Lister().Pods("x")
	for _, name := range []string{"bound", "unbound", "new"} {
		if p, err := pods.Get(name); err != nil || p.Spec.NodeName != "n" {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
	if _, err := pods.Get("absent"); !apierrors.IsNotFound(err) {
		t.Errorf("an absent pod: %v", err)
	}
	client.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewServiceUnavailable("the gateway is away")
	})
	if p, err := pods.Get("unbound"); err != nil || p.Spec.NodeName != "" {
		t.Errorf("without the gateway: %v, %v", p, err)
	}
	if _, err := pods.Get("absent"); !apierrors.IsNotFound(err) {
		t.Errorf("an absent pod without the gateway: %v", err)
	}
}

// A list that gets no slot ends after its timeout, and does not wait for the other lists.
func TestPodListsAreBounded(t *testing.T) {
	client := fake.NewClientset()
	f := newPluginInformers(apiclient.Informers(client), client, false)
	for range maxPodLists {
		f.pods.slots <- struct{}{}
	}
	if _, err := f.Core().V1().Pods().Lister().Pods("x").List(labels.Everything()); err == nil {
		t.Error("a list beyond the bound succeeds")
	}
}
