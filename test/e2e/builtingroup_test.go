package e2e

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"

	"watershed.dev/test/harness"
)

// xroles is a CRD with the name of a built-in resource and another version.
const xroles = `{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {
  name: roles.rbac.authorization.k8s.io, annotations: {api-approved.kubernetes.io: "unapproved, test"}}, spec: {
  group: rbac.authorization.k8s.io, scope: Namespaced,
  names: {plural: roles, singular: xrole, kind: XRole, listKind: XRoleList},
  versions: [{name: v9, served: true, storage: true,
    schema: {openAPIV3Schema: {type: object, description: DESCRIPTION, x-kubernetes-preserve-unknown-fields: true}}}]}}`

// TestACRDInABuiltInGroup checks that a CRD with the name of a built-in resource is not served, as in kube-apiserver.
// Its objects were served as built-in objects, and a change of it ended the watches of these.
func TestACRDInABuiltInGroup(t *testing.T) {
	t.Parallel()
	theirs, ours := harness.Twins(t)
	const (
		crd    = "roles.rbac.authorization.k8s.io"
		object = "apiVersion: rbac.authorization.k8s.io/v9\nkind: XRole\nmetadata: {name: x}\n"
	)
	for name, s := range map[string]*harness.Server{"kube-apiserver": theirs, "Watershed": ours} {
		s.Apply(strings.Replace(xroles, "DESCRIPTION", "one", 1))
		s.Kubectl("wait", "--for=condition=Established", "crd/"+crd)
		s.Kubectl("create", "role", "built-in", "--verb=get", "--resource=pods")
		for path, want := range map[string]string{
			"/v1/namespaces/default/roles/built-in": `"name":"built-in"`,
			"/v9/namespaces/default/roles/built-in": "could not find the requested resource",
			"/v9/namespaces/default/roles":          "could not find the requested resource",
			"/v9":                                   "could not find the requested resource",
		} {
			out, err := s.TryKubectl("", "get", "--raw", "/apis/rbac.authorization.k8s.io"+path)
			if err != nil {
				out += err.Error()
			}
			if !strings.Contains(out, want) {
				t.Errorf("%s of %s: %s", path, name, out)
			}
		}
		if out, err := s.TryKubectl(object, "create", "-f", "-"); err == nil {
			t.Errorf("%s creates an object: %s", name, out)
		}
		roles := s.Client().RbacV1().Roles("default")
		list, err := roles.List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		w, err := roles.Watch(t.Context(), metav1.ListOptions{ResourceVersion: list.ResourceVersion})
		if err != nil {
			t.Fatal(err)
		}
		s.Apply(strings.Replace(xroles, "DESCRIPTION", "two", 1))
		s.Kubectl("create", "role", "later", "--verb=get", "--resource=pods")
		s.Kubectl("delete", "crd", crd)
		s.Kubectl("delete", "role", "later")
		for _, want := range []watch.EventType{watch.Added, watch.Deleted} {
			if e := next(t, w); e.Type != want {
				t.Errorf("the watch of Roles at %s has the event %v, not %s", name, e, want)
			}
		}
		w.Stop()
	}
}

// TestTheAPIOfAPIServicesIsLocal checks that an APIService cannot take over the API of APIServices, as in
// kube-apiserver. No request could delete such an APIService.
func TestTheAPIOfAPIServicesIsLocal(t *testing.T) {
	t.Parallel()
	theirs, ours := harness.Twins(t)
	for name, s := range map[string]*harness.Server{"kube-apiserver": theirs, "Watershed": ours} {
		s.Apply(`{apiVersion: apiregistration.k8s.io/v1, kind: APIService, metadata: {name: v1.apiregistration.k8s.io},
  spec: {group: apiregistration.k8s.io, version: v1, groupPriorityMinimum: 1, versionPriority: 1,
    insecureSkipTLSVerify: true, service: {namespace: default, name: none}}}`)
		s.Kubectl("wait", "--for=condition=Available=False", "apiservice/v1.apiregistration.k8s.io")
		out, err := s.TryKubectl("", "delete", "apiservice", "v1.apiregistration.k8s.io")
		if err != nil {
			t.Errorf("%s: %s: %v", name, out, err)
		}
	}
}

// TestAPolicySeesACustomResourceOfAKnownKind checks that admission takes a custom resource for no Go type with the same
// kind. The policy saw an object without the fields that the type lacks.
func TestAPolicySeesACustomResourceOfAKnownKind(t *testing.T) {
	t.Parallel()
	s := harness.Up(t, "")
	s.Apply(`{apiVersion: apiextensions.k8s.io/v1, kind: CustomResourceDefinition, metadata: {
  name: imagereviews.imagepolicy.k8s.io, annotations: {api-approved.kubernetes.io: "unapproved, test"}}, spec: {
  group: imagepolicy.k8s.io, scope: Namespaced,
  names: {plural: imagereviews, singular: imagereview, kind: ImageReview, listKind: ImageReviewList},
  versions: [{name: v1alpha1, served: true, storage: true,
    schema: {openAPIV3Schema: {type: object, x-kubernetes-preserve-unknown-fields: true}}}]}}
---
{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicy, metadata: {name: harmless}, spec: {
  matchConstraints: {resourceRules: [{apiGroups: [imagepolicy.k8s.io], apiVersions: [v1alpha1], operations: [CREATE],
    resources: [imagereviews]}]},
  validations: [{expression: "!has(object.spec.harm)", message: "it does harm"}]}}
---
{apiVersion: admissionregistration.k8s.io/v1, kind: ValidatingAdmissionPolicyBinding, metadata: {name: harmless},
  spec: {policyName: harmless, validationActions: [Deny]}}
`)
	const object = "{apiVersion: imagepolicy.k8s.io/v1alpha1, kind: ImageReview, metadata: {name: x}, spec: {harm: 1}}"
	harness.Eventually(t, harness.Soon, func() error {
		out, err := s.TryKubectl(object, "create", "--dry-run=server", "-f", "-")
		if text := fmt.Sprint(out, err); err == nil || !strings.Contains(text, "it does harm") {
			return errors.New(text)
		}
		return nil
	})
}
