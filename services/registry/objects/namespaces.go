package objects

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
)

// Namespaces runs NamespaceLifecycle where nothing else in the admission chain looks at a write: it spares ConfigMaps,
// Secrets, Events, Leases and EndpointSlices the hop to admission. It is upstream's plugin over registry's own
// informer.
type Namespaces struct {
	lifecycle *lifecycle.Lifecycle
	synced    func() bool
	fresh     func() bool
}

// immortal are the namespaces that may not be deleted (k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle).
var immortal = sets.New(metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic)

// NewNamespaces reads namespaces by f, and in doubt by client. fresh says whether what f reads is new enough to decide
// by.
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

// Lifecycle implements verbs.Gate: it is nil where registry does not know the namespaces, or not as they are now.
func (n *Namespaces) Lifecycle() admission.MutationInterface {
	if n == nil || !n.synced() || !n.fresh() {
		return nil
	}
	return n.lifecycle
}
