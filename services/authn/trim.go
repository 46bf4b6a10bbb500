package authn

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// maxTokenBytes bounds the token of a cached Secret. kube-controller-manager's tokens have about 1 KB.
const maxTokenBytes = 32 << 10

// maxSecrets and maxNameBytes bound the names of Secrets of a cached ServiceAccount. A name of a legacy token's Secret
// says that a controller created the token. Controllers created few for an account.
const (
	maxSecrets   = 10
	maxNameBytes = 1 << 10
)

// trim removes the fields of ServiceAccounts and of their token Secrets that no authenticator reads, because any tenant
// may create these objects with 1 MB each. A longer token is removed too: it matches no request then.
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
		trimMeta(&o.ObjectMeta)
		token, ok := o.Data[corev1.ServiceAccountTokenKey]
		o.Data, o.StringData = nil, nil
		if ok && len(token) <= maxTokenBytes {
			o.Data = map[string][]byte{corev1.ServiceAccountTokenKey: token}
		}
	}
}

// trimMeta keeps labels: a legacy token's Secret has the dates of its last use and of its invalidation there.
func trimMeta(m *metav1.ObjectMeta) {
	m.Annotations, m.ManagedFields, m.OwnerReferences, m.Finalizers = nil, nil, nil, nil
}
