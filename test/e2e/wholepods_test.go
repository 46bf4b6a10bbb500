package e2e

import (
	"errors"
	"strings"
	"testing"

	"watershed.dev/test/harness"
)

// Services cache pods without most of their fields. PodSecurity and a policy with a pod as its parameter read whole
// pods nonetheless, as in kube-apiserver.
func TestPluginsReadWholePods(t *testing.T) {
	t.Parallel()
	const (
		parameter = `{apiVersion: v1, kind: Pod, metadata: {name: allowed, labels: {a: b}}, spec: {containers: [` +
			`{name: c, image: i, securityContext: {privileged: true}, env: [{name: ALLOWED, value: good}]}]}}`
		policy = `{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy, metadata: {name: p},
spec: {paramKind: {apiVersion: v1, kind: Pod}, matchConstraints: {resourceRules: [{apiGroups: [""],
apiVersions: [v1], operations: [CREATE], resources: [configmaps]}]}, validations: [{expression:
"object.data.k == params.spec.containers[0].env[0].value && params.metadata.labels.a == 'b'",
message: not as the pod says}]}}`
		binding = `{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding,
metadata: {name: b}, spec: {policyName: p, validationActions: [Deny],
paramRef: {name: allowed, parameterNotFoundAction: Deny}}}`
		configMap = `{apiVersion: v1, kind: ConfigMap, metadata: {name: KIND}, data: {k: KIND}}`
	)
	for name, s := range map[string]*harness.Server{"up": harness.Up(t, ""), "kube-apiserver": harness.Oracle(t)} {
		t.Run(name, func(t *testing.T) {
			s.Kubectl("create", "namespace", "whole")
			s.Kubectl("create", "serviceaccount", "default", "-n", "whole")
			harness.Eventually(t, harness.Soon, func() error {
				out, err := s.TryKubectl(parameter, "apply", "-n", "whole", "-f", "-")
				if err != nil {
					return errors.New(out)
				}
				return nil
			})
			contains(t, "label", s.Kubectl("label", "namespace", "whole", "pod-security.kubernetes.io/enforce=baseline"),
				"allowed: privileged")
			s.Apply(policy)
			s.Apply(binding)
			defer s.Kubectl("delete", "validatingadmissionpolicybinding/b", "validatingadmissionpolicy/p")
			harness.Eventually(t, harness.Soon, func() error {
				out, err := s.TryKubectl(strings.ReplaceAll(configMap, "KIND", "bad"), "create", "--dry-run=server",
					"-n", "whole", "-f", "-")
				if err == nil || !strings.Contains(out, "not as the pod says") {
					return errors.New("the policy does not apply yet: " + out)
				}
				return nil
			})
			out, err := s.TryKubectl(strings.ReplaceAll(configMap, "KIND", "good"), "create", "-n", "whole", "-f", "-")
			if err != nil {
				t.Error(out)
			}
		})
	}
}
