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
func Operations(all []*admissionv1.Interest, r *commonv1.Resource, namespace, name string,
	u *commonv1.User) (ops []admissionv1.Operation) {
	for _, in := range all {
		if (in.Group == "*" || in.Group == r.Group) && (in.Resource == "*" || in.Resource == r.Resource) &&
			(in.Subresource == "*" || in.Subresource == r.Subresource) &&
			(in.UserGroup == "" || slices.Contains(u.GetGroups(), in.UserGroup)) &&
			(in.UnlessOwnIn == "" || in.UnlessOwnIn != namespace || !Own(u, name)) {
			ops = append(ops, in.Operations...)
		}
	}
	return ops
}
