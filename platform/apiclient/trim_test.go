package apiclient

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
)

// The pods and nodes of informers have only the fields that the services read.
func TestPodsAndNodesAreTrimmed(t *testing.T) {
	const container = `{"name":"c","image":"i","command":["c"],"env":[{"name":"A","value":"v"},
		{"name":"N","valueFrom":{"fieldRef":{"fieldPath":"spec.nodeName"}}},
		{"name":"S","valueFrom":{"secretKeyRef":{"name":"s","key":"k"}}}]}`
	for name, c := range map[string]struct {
		obj, want any
		in, out   string
	}{
		"pod": {&corev1.Pod{}, &corev1.Pod{},
			`{"metadata":{"name":"p","namespace":"x","uid":"u","resourceVersion":"7","labels":{"l":"v"},
			"annotations":{"a":"v","kubernetes.io/config.mirror":"m"}},"spec":{"nodeName":"n","priority":1,
			"serviceAccountName":"a","imagePullSecrets":[{"name":"i"}],"volumes":[{"name":"v","secret":{"secretName":"w"}}],
			"resourceClaims":[{"name":"r"}],"initContainers":[{"name":"b","envFrom":[{"secretRef":{"name":"f"}}]}],
			"containers":[{"name":"plain","image":"i"},` + container + `],
			"ephemeralContainers":[{"name":"e","image":"i"}]},"status":{"message":"m",
			"resourceClaimStatuses":[{"name":"r","resourceClaimName":"q"}],
			"extendedResourceClaimStatus":{"resourceClaimName":"z"}}}`,
			`{"metadata":{"name":"p","namespace":"x","uid":"u","resourceVersion":"7",
			"annotations":{"kubernetes.io/config.mirror":""}},"spec":{"nodeName":"n",
			"serviceAccountName":"a","imagePullSecrets":[{"name":"i"}],"volumes":[{"name":"v","secret":{"secretName":"w"}}],
			"resourceClaims":[{"name":"r"}],"initContainers":[{"name":"b","envFrom":[{"secretRef":{"name":"f"}}]}],
			"containers":[{"name":"c","env":[{"name":"S","valueFrom":{"secretKeyRef":{"name":"s","key":"k"}}}]}],
			"ephemeralContainers":[{"name":"e"}]},
			"status":{"resourceClaimStatuses":[{"name":"r","resourceClaimName":"q"}],
			"extendedResourceClaimStatus":{"resourceClaimName":"z"}}}`},
		"node": {&corev1.Node{}, &corev1.Node{},
			`{"metadata":{"name":"n","uid":"u","labels":{"l":"v"}},"spec":{"podCIDR":"10.0.0.0/24"},"status":{
			"allocatable":{"cpu":"1"},"images":[{"names":["i"]}],"conditions":[{"type":"Ready"}],
			"declaredFeatures":["f"],"volumesInUse":["v"],"volumesAttached":[{"name":"v","devicePath":"d"}]}}`,
			`{"metadata":{"name":"n","uid":"u","labels":{"l":"v"}},"spec":{"podCIDR":"10.0.0.0/24"},
			"status":{"allocatable":{"cpu":"1"},"declaredFeatures":["f"]}}`},
		"another kind": {&corev1.Service{}, &corev1.Service{},
			`{"metadata":{"name":"s"},"status":{"conditions":[{"type":"t"}]}}`,
			`{"metadata":{"name":"s"},"status":{"conditions":[{"type":"t"}]}}`},
	} {
		t.Run(name, func(t *testing.T) {
			err := errors.Join(json.Unmarshal([]byte(c.in), c.obj), json.Unmarshal([]byte(c.out), c.want))
			if err != nil {
				t.Fatal(err)
			}
			if trim(c.obj); !equality.Semantic.DeepEqual(c.obj, c.want) {
				got, _ := json.Marshal(c.obj)
				t.Errorf("it is %s\nand not %s", got, strings.Join(strings.Fields(c.out), ""))
			}
		})
	}
}
