package objects

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
)

// Registry answers NamespaceLifecycle's question as the plugin does in admission, and not at all while what it knows of
// namespaces is not what they are.
func TestNamespaceLifecycle(t *testing.T) {
	namespace := func(name string, phase corev1.NamespacePhase) *corev1.Namespace {
		return &corev1.Namespace{
			ObjectMeta: metav1.ObjectMeta{Name: name},
			Status:     corev1.NamespaceStatus{Phase: phase},
		}
	}
	client := fake.NewClientset(namespace("lives", corev1.NamespaceActive),
		namespace("ends", corev1.NamespaceTerminating))
	f := informers.NewSharedInformerFactory(client, 0)
	fresh := true
	n, err := NewNamespaces(f, client, func() bool { return fresh })
	if err != nil {
		t.Fatal(err)
	}
	if n.Lifecycle() != nil {
		t.Error("it answers before it has read the namespaces")
	}
	f.Start(t.Context().Done())
	f.WaitForCacheSync(t.Context().Done())
	maps, core := corev1.SchemeGroupVersion.WithKind("ConfigMap"), corev1.SchemeGroupVersion
	for _, c := range []struct {
		kind            schema.GroupVersionKind
		resource        string
		namespace, name string
		op              admission.Operation
		refused         string
	}{
		{maps, "configmaps", "lives", "m", admission.Create, ""},
		{maps, "configmaps", "lives", "m", admission.Update, ""},
		{maps, "configmaps", "ends", "m", admission.Create, "because it is being terminated"},
		{maps, "configmaps", "ends", "m", admission.Update, ""},
		{maps, "configmaps", "nowhere", "m", admission.Create, `namespaces "nowhere" not found`},
		{maps, "configmaps", "nowhere", "m", admission.Update, `namespaces "nowhere" not found`},
		{core.WithKind("Node"), "nodes", "", "n", admission.Create, ""},
		{core.WithKind("Namespace"), "namespaces", "kube-system", "kube-system", admission.Delete,
			"this namespace may not be deleted"},
		{core.WithKind("Namespace"), "namespaces", "lives", "lives", admission.Delete, ""},
	} {
		a := admission.NewAttributesRecord(nil, nil, c.kind, c.namespace, c.name, core.WithResource(c.resource), "",
			c.op, nil, false, &user.DefaultInfo{Name: "jane"})
		err := n.Lifecycle().Admit(t.Context(), a, nil)
		if (err != nil) != (c.refused != "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%s %s in %q: %v", c.op, c.resource, c.namespace, err)
		}
		if strings.Contains(c.refused, "terminated") && !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			t.Errorf("%s in %q lacks its cause: %v", c.op, c.namespace, err)
		}
	}
	// It is deleted, and the informer has not heard of it: the namespace is looked at itself.
	if _, err := client.CoreV1().Namespaces().UpdateStatus(t.Context(), namespace("lives", corev1.NamespaceTerminating),
		metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	a := admission.NewAttributesRecord(nil, nil, maps, "lives", "m", core.WithResource("configmaps"), "",
		admission.Create, nil, false, &user.DefaultInfo{Name: "jane"})
	if err := n.Lifecycle().Admit(t.Context(), a, nil); err == nil {
		t.Error("something is created in a namespace that was deleted")
	}
	fresh = false
	if n.Lifecycle() != nil {
		t.Error("it answers by what is too old")
	}
	var none *Namespaces
	if none.Lifecycle() != nil {
		t.Error("it answers without knowing any namespace")
	}
}
