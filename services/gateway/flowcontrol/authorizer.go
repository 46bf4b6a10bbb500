package flowcontrol

import (
	"context"
	"slices"

	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// LoopbackAuthorizer is what flow control may do by the gateway's own API: follow its objects, and say of each FlowSchema whether
// its level exists. The gateway says so itself: nobody else can be that client, and an authz of an older release does
// not know it.
var LoopbackAuthorizer = authorizer.AuthorizerFunc(func(_ context.Context,
	a authorizer.Attributes) (authorizer.Decision, string, error) {
	allowed := false
	switch a.GetAPIGroup() + "/" + a.GetResource() {
	case "flowcontrol.apiserver.k8s.io/flowschemas":
		allowed = a.GetSubresource() == "status" && a.GetVerb() == "patch" || isRead(a)
	case "flowcontrol.apiserver.k8s.io/prioritylevelconfigurations":
		allowed = isRead(a)
	}
	if allowed {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionDeny, "flow control needs no more", nil
})

func isRead(a authorizer.Attributes) bool {
	return a.GetSubresource() == "" && slices.Contains([]string{"get", "list", "watch"}, a.GetVerb())
}
