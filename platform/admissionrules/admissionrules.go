// Package interest matches requests with what the admission chain looks at: the gateway decides by it what admission is
// asked about, and admission's tests prove by the same that nothing is left out.
package admissionrules

import (
	"slices"

	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// nodeUserPrefix is how the names of nodes' users begin (k8s.io/kubernetes/pkg/auth/nodeidentifier).
const nodeUserPrefix = "system:node:"

// IsOwnNode says whether an object has the name of the node that a user is.
func IsOwnNode(u *commonv1.User, object string) bool {
	return object != "" && u.GetName() == nodeUserPrefix+object
}

// Operations are those that somebody looks at of a user's request on an object of r, each as often as somebody does.
// flagged are those at which nobody looks but with an interest that has a flag, and others are the others.
func Operations(rules []*admissionv1.AdmissionRule, r *commonv1.Resource, namespace, name string, u *commonv1.User,
	flag func(*admissionv1.AdmissionRule) bool) (others, flagged []admissionv1.Operation) {
	for _, rule := range rules {
		if !matches(rule, r, namespace, name, u) {
			continue
		}
		if flag(rule) {
			flagged = append(flagged, rule.Operations...)
		} else {
			others = append(others, rule.Operations...)
		}
	}
	flagged = slices.DeleteFunc(flagged, func(op admissionv1.Operation) bool { return slices.Contains(others, op) })
	return others, flagged
}

func matches(rule *admissionv1.AdmissionRule, r *commonv1.Resource, namespace, name string, u *commonv1.User) bool {
	if (rule.Group != "*" && rule.Group != r.Group) || (rule.Resource != "*" && rule.Resource != r.Resource) ||
		(rule.Subresource != "*" && rule.Subresource != r.Subresource) {
		return false
	}
	if len(rule.Namespaces) > 0 {
		if _, found := slices.BinarySearch(rule.Namespaces, namespace); !found {
			return false
		}
	}
	return (rule.UserGroup == "" || slices.Contains(u.GetGroups(), rule.UserGroup)) &&
		(rule.ExceptOwnObjectIn == "" || rule.ExceptOwnObjectIn != namespace || !IsOwnNode(u, name))
}
