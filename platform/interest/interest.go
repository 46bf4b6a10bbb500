// Package interest matches requests with what the admission chain looks at: the gateway decides by it what admission is
// asked about, and admission's tests prove by the same that nothing is left out.
package interest

import (
	"slices"

	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// nodeUser is how the names of nodes' users begin (k8s.io/kubernetes/pkg/auth/nodeidentifier).
const nodeUser = "system:node:"

// Own says whether an object has the name of the node that a user is.
func Own(u *commonv1.User, object string) bool { return object != "" && u.GetName() == nodeUser+object }

// Operations are those that somebody looks at of a user's request on an object of r, each as often as somebody does.
// flagged are those at which nobody looks but with an interest that has a flag, and others are the others.
func Operations(all []*admissionv1.AdmissionRule, r *commonv1.Resource, namespace, name string, u *commonv1.User,
	flag func(*admissionv1.AdmissionRule) bool) (others, flagged []admissionv1.Operation) {
	for _, in := range all {
		if !matches(in, r, namespace, name, u) {
			continue
		}
		if flag(in) {
			flagged = append(flagged, in.Operations...)
		} else {
			others = append(others, in.Operations...)
		}
	}
	flagged = slices.DeleteFunc(flagged, func(op admissionv1.Operation) bool { return slices.Contains(others, op) })
	return others, flagged
}

func matches(in *admissionv1.AdmissionRule, r *commonv1.Resource, namespace, name string, u *commonv1.User) bool {
	if (in.Group != "*" && in.Group != r.Group) || (in.Resource != "*" && in.Resource != r.Resource) ||
		(in.Subresource != "*" && in.Subresource != r.Subresource) {
		return false
	}
	if len(in.Namespaces) > 0 {
		if _, there := slices.BinarySearch(in.Namespaces, namespace); !there {
			return false
		}
	}
	return (in.UserGroup == "" || slices.Contains(u.GetGroups(), in.UserGroup)) &&
		(in.ExceptOwnObjectIn == "" || in.ExceptOwnObjectIn != namespace || !Own(u, name))
}
