package flowcontrol

import (
	"context"
	"slices"

	"k8s.io/apiserver/pkg/authorization/authorizer"
)

// LoopbackAuthorizer authorizes flow control's calls to the gateway's own API. It may read its objects and patch the
// status of FlowSchemas, to report whether their priority level exists. The gateway decides this itself: no other
// client can use this identity, and an authz of an older release does not have it.
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
	return authorizer.DecisionDeny, "flow control needs no other permission", nil
})

func isRead(a authorizer.Attributes) bool {
	return a.GetSubresource() == "" && slices.Contains([]string{"get", "list", "watch"}, a.GetVerb())
}
