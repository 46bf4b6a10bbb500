// Package admissionrules matches requests with the rules of the admission chain. The gateway calls admission only for
// requests that match. Admission's tests use the same code to prove that the rules omit no request.
package admissionrules

import (
	"slices"
	"time"

	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// Lease is how long a message of Admission.AdmissionRules is valid. A gateway without a message for that time requests
// admission for every write, because its admission replica may be frozen and the rules may have changed.
const Lease = 3 * time.Second

// nodeUserPrefix is the prefix of the user names of nodes (k8s.io/kubernetes/pkg/auth/nodeidentifier).
const nodeUserPrefix = "system:node:"

// IsOwnNode returns true if the user is the node with the name of the object.
func IsOwnNode(u *commonv1.User, object string) bool {
	return object != "" && u.GetName() == nodeUserPrefix+object
}

// Operations returns the operations on an object of r for which a rule matches the user's request, once for each rule.
// flagged holds the operations whose matching rules all have the flag; others holds the rest.
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
