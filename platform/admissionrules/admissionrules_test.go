package admissionrules_test

import (
	"slices"
	"testing"

	"watershed.dev/platform/admissionrules"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// A rule matches its resources, wildcards, the requests of one group, and not the objects of the requesting node.
func TestRulesMatchRequests(t *testing.T) {
	create := []admissionv1.Operation{admissionv1.Operation_OPERATION_CREATE}
	update := []admissionv1.Operation{admissionv1.Operation_OPERATION_UPDATE}
	all := []*admissionv1.AdmissionRule{
		{Resource: "pods", Operations: create},
		{Group: "*", Resource: "*", Subresource: "*", UserGroup: "watched", Operations: update},
		{Group: "coordination.k8s.io", Resource: "leases", UserGroup: "system:nodes",
			ExceptOwnObjectIn: "kube-node-lease", Operations: update},
		{Group: "*", Resource: "*", Namespaces: []string{"counted", "full"}, Operations: create},
		{Group: "*", Resource: "*", Subresource: "*", NamespaceLifecycleOnly: true,
			Operations: append(create, update...)},
	}
	pods := &commonv1.Resource{Version: "v1", Resource: "pods"}
	leases := &commonv1.Resource{Group: "coordination.k8s.io", Version: "v1", Resource: "leases"}
	node := &commonv1.User{Name: "system:node:n", Groups: []string{"system:nodes"}}
	for name, c := range map[string]struct {
		of              *commonv1.Resource
		namespace, name string
		user            *commonv1.User
		// want lists the operations that admission reviews; the registry handles all others.
		want []admissionv1.Operation
	}{
		"a pod":                {pods, "x", "p", &commonv1.User{Name: "jane"}, create},
		"its status":           {&commonv1.Resource{Resource: "pods", Subresource: "status"}, "x", "p", node, nil},
		"another group's pods": {&commonv1.Resource{Group: "g", Resource: "pods"}, "x", "p", node, nil},
		"a pod of a matching group": {pods, "x", "p", &commonv1.User{Groups: []string{"watched"}},
			append(create, update...)},
		"a lease":                        {leases, "kube-node-lease", "n", &commonv1.User{Name: "jane"}, nil},
		"a node's own lease":             {leases, "kube-node-lease", "n", node, nil},
		"another node's lease":           {leases, "kube-node-lease", "m", node, update},
		"a lease of its name, elsewhere": {leases, "x", "n", node, update},
		"a lease that has no name yet":   {leases, "kube-node-lease", "", node, update},
		"a namespace with a quota":       {leases, "full", "m", &commonv1.User{Name: "jane"}, create},
		"a namespace without a quota":    {leases, "fuller", "m", &commonv1.User{Name: "jane"}, nil},
		"a cluster-scoped object": {&commonv1.Resource{Resource: "nodes"}, "", "m", &commonv1.User{Name: "jane"},
			nil},
		"a user with a node's short name": {leases, "kube-node-lease", "n",
			&commonv1.User{Name: "n", Groups: node.Groups}, update},
	} {
		got, own := admissionrules.Operations(all, c.of, c.namespace, c.name, c.user,
			(*admissionv1.AdmissionRule).GetNamespaceLifecycleOnly)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: admission reviews %v, not %v", name, got, c.want)
		}
		for _, op := range append(create, update...) {
			if slices.Contains(own, op) == slices.Contains(got, op) {
				t.Errorf("%s: admission reviews %v, and registry handles %v", name, got, own)
			}
		}
	}
}
