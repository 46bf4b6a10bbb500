package authn

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubernetes/pkg/serviceaccount"
)

// maxTokenBytes bounds the token of a cached Secret. kube-controller-manager's tokens have about 1 KB.
const maxTokenBytes = 32 << 10

// maxSecrets and maxNameBytes bound the names of Secrets of a cached ServiceAccount. A name of a legacy token's Secret
// says that a controller created the token. Controllers created few Secrets for an account.
const (
	maxSecrets   = 10
	maxNameBytes = 1 << 10
)

// trim removes the fields of ServiceAccounts and of their token Secrets that no authenticator reads, because any tenant
// may create these objects with 1 MB each. A longer token is removed too: it matches no request then. Of a Secret's
// labels, it keeps the dates of a legacy token's last use and of its invalidation.
func trim(obj any) {
	switch o := obj.(type) {
	case *corev1.ServiceAccount:
		trimMeta(&o.ObjectMeta)
		o.ImagePullSecrets = nil
		names := 0
		var secrets []corev1.ObjectReference
		for _, s := range o.Secrets {
			if names += len(s.Name); names > maxNameBytes || len(secrets) == maxSecrets {
				break
			}
			secrets = append(secrets, corev1.ObjectReference{Name: s.Name})
		}
		o.Secrets = secrets
	case *corev1.Secret:
		labels := o.Labels
		trimMeta(&o.ObjectMeta)
		for _, key := range []string{serviceaccount.InvalidSinceLabelKey, serviceaccount.LastUsedLabelKey} {
			if date, ok := labels[key]; ok {
				metav1.SetMetaDataLabel(&o.ObjectMeta, key, date)
			}
		}
		token, ok := o.Data[corev1.ServiceAccountTokenKey]
		o.Data, o.StringData = nil, nil
		if ok && len(token) <= maxTokenBytes {
			o.Data = map[string][]byte{corev1.ServiceAccountTokenKey: token}
		}
	}
}

// trimMeta removes the metadata of any length, except name and namespace.
func trimMeta(m *metav1.ObjectMeta) {
	m.GenerateName = ""
	m.Labels, m.Annotations, m.ManagedFields, m.OwnerReferences, m.Finalizers = nil, nil, nil, nil, nil
}
