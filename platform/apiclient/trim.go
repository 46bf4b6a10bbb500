package apiclient

import (
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// trim removes the fields of pods and nodes that no service reads. Without it, a pod of 7.6 KB as JSON takes 10 KB of
// the heap, and a node with 50 images about 15 KB.
func trim(obj any) {
	switch o := obj.(type) {
	case *corev1.Pod:
		trimPod(o)
	case *corev1.Node:
		o.Status.Conditions, o.Status.Images = nil, nil
		o.Status.VolumesInUse, o.Status.VolumesAttached = nil, nil
	}
}

// trimPod keeps the fields that the node authorizer and NodeRestriction read: the identity of a pod, its node, and its
// references (k8s.io/kubernetes/plugin/pkg/auth/authorizer/node, Graph.AddPod, and
// plugin/pkg/admission/noderestriction). Of containers, it keeps the references of their environment.
func trimPod(pod *corev1.Pod) {
	m := metav1.ObjectMeta{
		Name:            pod.Name,
		Namespace:       pod.Namespace,
		UID:             pod.UID,
		ResourceVersion: pod.ResourceVersion,
	}
	if _, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]; ok { // its value may be long, and is not read
		m.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: ""}
	}
	spec := corev1.PodSpec{
		NodeName:           pod.Spec.NodeName,
		ServiceAccountName: pod.Spec.ServiceAccountName,
		ImagePullSecrets:   pod.Spec.ImagePullSecrets,
		Volumes:            pod.Spec.Volumes,
		ResourceClaims:     pod.Spec.ResourceClaims,
		InitContainers:     withReferences(pod.Spec.InitContainers),
		Containers:         withReferences(pod.Spec.Containers),
	}
	for _, c := range pod.Spec.EphemeralContainers { // all, because the authorizer compares their number
		common := corev1.EphemeralContainerCommon{Name: c.Name, Env: envReferences(c.Env), EnvFrom: c.EnvFrom}
		spec.EphemeralContainers = append(spec.EphemeralContainers,
			corev1.EphemeralContainer{EphemeralContainerCommon: common})
	}
	*pod = corev1.Pod{TypeMeta: pod.TypeMeta, ObjectMeta: m, Spec: spec, Status: corev1.PodStatus{
		ResourceClaimStatuses:       pod.Status.ResourceClaimStatuses,
		ExtendedResourceClaimStatus: pod.Status.ExtendedResourceClaimStatus,
	}}
}

// withReferences returns the containers whose environment refers to Secrets or ConfigMaps, with these references only.
func withReferences(containers []corev1.Container) (kept []corev1.Container) {
	for _, c := range containers {
		if env := envReferences(c.Env); len(env)+len(c.EnvFrom) > 0 {
			kept = append(kept, corev1.Container{Name: c.Name, Env: env, EnvFrom: c.EnvFrom})
		}
	}
	return kept
}

// envReferences returns the variables with a value from a Secret or a ConfigMap.
func envReferences(env []corev1.EnvVar) (kept []corev1.EnvVar) {
	for _, e := range env {
		if s := e.ValueFrom; s != nil && (s.SecretKeyRef != nil || s.ConfigMapKeyRef != nil) {
			kept = append(kept, e)
		}
	}
	return kept
}
