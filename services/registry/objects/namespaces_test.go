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

// The registry's NamespaceLifecycle decides as the plugin in admission does. It does not decide while its informer is
// stale.
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
		t.Error("it decides before the informer is synced")
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
		if strings.Contains(c.refused, "terminated") &&
			!apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
			t.Errorf("%s in %q lacks its cause: %v", c.op, c.namespace, err)
		}
	}
	// The namespace is deleted and the informer has not received it: the plugin makes a live lookup.
	if _, err := client.CoreV1().Namespaces().UpdateStatus(t.Context(), namespace("lives", corev1.NamespaceTerminating),
		metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	a := admission.NewAttributesRecord(nil, nil, maps, "lives", "m", core.WithResource("configmaps"), "",
		admission.Create, nil, false, &user.DefaultInfo{Name: "jane"})
	if err := n.Lifecycle().Admit(t.Context(), a, nil); err == nil {
		t.Error("an object is created in a deleted namespace")
	}
	fresh = false
	if n.Lifecycle() != nil {
		t.Error("it decides by a stale informer")
	}
	var none *Namespaces
	if none.Lifecycle() != nil {
		t.Error("a nil Namespaces decides")
	}
}
