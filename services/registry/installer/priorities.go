package installer

import (
	"k8s.io/apimachinery/pkg/runtime/schema"
	controlplaneapiserver "k8s.io/kubernetes/pkg/controlplane/apiserver"
)

// Priority orders groups and versions in /apis, as the priorities of APIServices do in kube-aggregator.
type Priority = controlplaneapiserver.APIServicePriority

// Priorities returns kube-apiserver's priorities (cmd/kube-apiserver/app/aggregator.go at 1.36).
func Priorities() map[schema.GroupVersion]Priority {
	p := controlplaneapiserver.DefaultGenericAPIServicePriorities()
	for group, priority := range map[string]struct {
		group    int32
		versions map[string]int32
	}{
		"apps":                   {17800, map[string]int32{"v1": 15}},
		"autoscaling":            {17500, map[string]int32{"v1": 15, "v2": 30}},
		"batch":                  {17400, map[string]int32{"v1": 15}},
		"networking.k8s.io":      {17200, map[string]int32{"v1": 15, "v1beta1": 9}},
		"policy":                 {17100, map[string]int32{"v1": 15, "v1beta1": 9}},
		"storage.k8s.io":         {16800, map[string]int32{"v1": 15, "v1beta1": 9, "v1alpha1": 1}},
		"scheduling.k8s.io":      {16600, map[string]int32{"v1": 15, "v1alpha2": 2}},
		"node.k8s.io":            {16300, map[string]int32{"v1": 15, "v1beta1": 9, "v1alpha1": 1}},
		"resource.k8s.io":        {16200, map[string]int32{"v1": 21, "v1beta2": 15, "v1beta1": 9, "v1alpha3": 1}},
		"apiregistration.k8s.io": {20000, map[string]int32{"v1": 15}},
	} {
		for v, n := range priority.versions {
			p[schema.GroupVersion{Group: group, Version: v}] = Priority{Group: priority.group, Version: n}
		}
	}
	return p
}
