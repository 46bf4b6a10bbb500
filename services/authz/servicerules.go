package authz

import (
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes/scheme"

	"watershed.dev/platform/identity"
)

// rule is a permission of a system service, independent of the cluster's policies, because a service reads the policies
// before they exist.
type rule struct {
	verbs     []string
	group     string
	resources []string
	// field and values restrict the rule to requests whose field selector requires one of the values.
	field  string
	values []string
}

var (
	readVerbs = []string{"get", "list", "watch"}

	// serviceRules are the services' permissions, by user name. docs/operators/security.md shows them.
	serviceRules = map[string][]rule{
		identity.Authn: {
			{verbs: readVerbs, resources: []string{"namespaces", "serviceaccounts"}},
			{verbs: []string{"get"}, resources: []string{"pods", "nodes"}},
			{
				verbs:     []string{"list", "watch"},
				resources: []string{"secrets"},
				field:     "type",
				values:    []string{"kubernetes.io/service-account-token", "bootstrap.kubernetes.io/token"},
			},
			// A legacy token may be looked up before the watch delivers it. Its secret is patched with the date of its
			// use (k8s.io/kubernetes/pkg/serviceaccount/legacy.go).
			{verbs: []string{"get", "patch"}, resources: []string{"secrets"}},
		},
		identity.Authz: {
			{verbs: readVerbs,
				resources: []string{"namespaces", "nodes", "pods", "persistentvolumes", "serviceaccounts"}},
			{
				verbs:     readVerbs,
				group:     "rbac.authorization.k8s.io",
				resources: []string{"roles", "rolebindings", "clusterroles", "clusterrolebindings"},
			},
			{verbs: readVerbs, group: "storage.k8s.io", resources: []string{"volumeattachments"}},
			{verbs: readVerbs, group: "resource.k8s.io", resources: []string{"resourceslices"}},
			{verbs: readVerbs, group: "certificates.k8s.io", resources: []string{"podcertificaterequests"}},
		},
		identity.Admission: {
			// A policy's parameters may be of any kind.
			{verbs: readVerbs, group: "*", resources: []string{"*"}},
			{verbs: []string{"update"}, resources: []string{"resourcequotas/status"}},
			{verbs: []string{"create"}, resources: []string{"namespaces"}}, // NamespaceAutoProvision
			{verbs: []string{"create"}, group: "authorization.k8s.io", resources: []string{"subjectaccessreviews"}},
		},
		identity.Registry: nil, // it calls webhooks only (isGrantable)
	}
)

// isGrantable reports whether the cluster's policy may allow a request that serviceRules do not. An aggregated API
// server may serve a webhook at its own path of the API (github.com/openshift/generic-admission-server). admission or
// registry then creates a review in the server's group, which no rule names. kube-apiserver calls it as a user of
// system:masters.
func isGrantable(a authorizer.Attributes) bool {
	name := a.GetUser().GetName()
	return (name == identity.Admission || name == identity.Registry) && a.IsResourceRequest() &&
		a.GetVerb() == "create" && a.GetSubresource() == "" && !builtIn(a.GetAPIGroup())
}

// builtIn reports whether kube-apiserver serves a group.
func builtIn(group string) bool {
	return scheme.Scheme.IsGroupRegistered(group) || group == "apiextensions.k8s.io" ||
		group == "apiregistration.k8s.io"
}

// discoveryPaths are the non-resource paths that every service may read. Mutating policies read their types from
// OpenAPI (k8s.io/apiserver/pkg/admission/plugin/policy/mutating/patch).
var discoveryPaths = []string{"/api", "/api/*", "/apis", "/apis/*", "/openapi/v3", "/openapi/v3/*", "/version"}

// serviceAllowed reports whether the user is a system service that serviceRules allow the request. isService is false
// for all other users.
func serviceAllowed(a authorizer.Attributes) (allowed, isService bool) {
	u := a.GetUser()
	if u == nil || !slices.Contains(u.GetGroups(), identity.ServicesGroup) {
		return false, false
	}
	rules, isService := serviceRules[u.GetName()]
	if !isService {
		return false, false
	}
	if !a.IsResourceRequest() {
		return a.GetVerb() == "get" && slices.ContainsFunc(discoveryPaths, func(p string) bool {
			prefix, below := strings.CutSuffix(p, "*")
			return a.GetPath() == p || below && strings.HasPrefix(a.GetPath(), prefix)
		}), true
	}
	return slices.ContainsFunc(rules, func(r rule) bool { return r.allows(a) }), true
}

func (r rule) allows(a authorizer.Attributes) bool {
	resource := a.GetResource()
	if s := a.GetSubresource(); s != "" {
		resource += "/" + s
	}
	wildcard := r.group == "*" && a.GetSubresource() == ""
	if !slices.Contains(r.verbs, a.GetVerb()) || !wildcard &&
		(r.group != a.GetAPIGroup() || !slices.Contains(r.resources, resource)) {
		return false
	}
	if r.field == "" {
		return true
	}
	selector, err := a.GetFieldSelector()
	return err == nil && slices.ContainsFunc(selector, func(f fields.Requirement) bool {
		return f.Field == r.field && (f.Operator == selection.Equals || f.Operator == selection.DoubleEquals) &&
			slices.Contains(r.values, f.Value)
	})
}
