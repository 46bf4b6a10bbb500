package objects

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
)

// Namespaces runs NamespaceLifecycle if no other admission plugin checks a write. This saves the call to admission for
// ConfigMaps, Secrets, Events, Leases and EndpointSlices. It is upstream's plugin over the registry's own informer.
type Namespaces struct {
	lifecycle *lifecycle.Lifecycle
	synced    func() bool
	fresh     func() bool
}

// immortal are the namespaces that cannot be deleted (k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle).
var immortal = sets.New(metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic)

// NewNamespaces returns a plugin that reads namespaces from f, and with live lookups by client. fresh reports whether f
// is fresh enough to decide by.
func NewNamespaces(f informers.SharedInformerFactory, client kubernetes.Interface,
	fresh func() bool) (*Namespaces, error) {
	plugin, err := lifecycle.NewLifecycle(immortal)
	if err != nil {
		return nil, err
	}
	plugin.SetExternalKubeInformerFactory(f)
	plugin.SetExternalKubeClientSet(client)
	synced := f.Core().V1().Namespaces().Informer().HasSynced
	return &Namespaces{plugin, synced, fresh}, plugin.ValidateInitialization()
}

// Lifecycle implements handlers.Callbacks. It returns nil if the informer is not synced or not fresh: admission then
// decides.
func (n *Namespaces) Lifecycle() admission.MutationInterface {
	if n == nil || !n.synced() || !n.fresh() {
		return nil
	}
	return n.lifecycle
}
