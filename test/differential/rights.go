package main

import (
	"fmt"
	"net/http"
)

// rights returns requests without credentials.
func rights() (all []*request) {
	get := func(paths ...string) {
		for _, p := range paths {
			all = append(all, &request{method: http.MethodGet, path: p})
		}
	}
	send := func(method, path, body string) {
		all = append(all, &request{
			method: method, path: path, body: []byte(body),
			header: map[string]string{"Content-Type": "application/json"},
		})
	}
	get(
		"/api",
		"/apis",
		"/api/v1",
		"/apis/apps/v1",
		"/version",
		"/healthz",
		"/livez",
		"/readyz",
		"/metrics",
		"/logs/",
		"/nonsense",
		"/.well-known/openid-configuration",
		"/api/v1/namespaces/default/secrets",
		"/api/v1/namespaces/default/secrets/mounted",
		"/api/v1/namespaces/default/secrets/loose",
		"/api/v1/namespaces/default/secrets/hooked",
		"/api/v1/namespaces/default/secrets/absent",
		"/api/v1/namespaces/other/secrets/mounted",
		"/api/v1/namespaces/default/secrets?fieldSelector=metadata.name%3Dmounted",
		"/api/v1/namespaces/default/secrets?fieldSelector=metadata.name%3Dmounted&watch=true&timeoutSeconds=5",
		"/api/v1/namespaces/default/configmaps",
		"/api/v1/namespaces/default/configmaps/one",
		"/api/v1/namespaces/default/configmaps/mounted",
		"/api/v1/namespaces/other/configmaps/one",
		"/api/v1/namespaces/default/configmaps?fieldSelector=metadata.name%3Done",
		"/api/v1/namespaces/default/configmaps?fieldSelector=metadata.name%21%3Done",
		"/api/v1/namespaces/default/configmaps?labelSelector=a%20in%20(b,c),!d",
		"/api/v1/namespaces/default/configmaps?labelSelector=%3D%3D",
		"/api/v1/configmaps",
		"/api/v1/namespaces/default/pods/here",
		"/api/v1/namespaces/default/pods/there",
		"/api/v1/namespaces/default/pods/here/status",
		"/api/v1/namespaces/default/pods/here/log",
		"/api/v1/pods?fieldSelector=spec.nodeName%3Dn1",
		"/api/v1/pods?fieldSelector=spec.nodeName%3Dn2",
		"/api/v1/pods",
		"/api/v1/nodes",
		"/api/v1/nodes/n1",
		"/api/v1/nodes/n2",
		"/api/v1/nodes?fieldSelector=metadata.name%3Dn1",
		"/api/v1/nodes/n1/proxy/healthz",
		"/api/v1/namespaces",
		"/api/v1/namespaces/default",
		"/api/v1/namespaces/other/services",
		"/api/v1/namespaces/default/services/x",
		"/api/v1/namespaces/default/endpoints/x",
		"/api/v1/namespaces/default/endpoints?fieldSelector=metadata.name%3Dx",
		"/api/v1/events",
		"/api/v1/namespaces/default/events",
		"/apis/apps/v1/deployments",
		"/apis/apps/v1/namespaces/other/deployments/x",
		"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n1",
		"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/n2",
		"/apis/storage.k8s.io/v1/csinodes/n1",
		"/apis/storage.k8s.io/v1/csinodes/n2",
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/reader",
		"/apis/nonsense/v1/things",
		"/api/v1/nonsense",
	)
	send(
		"POST",
		"/api/v1/namespaces/default/configmaps?dryRun=All",
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"new"}}`,
	)
	send(
		"PUT",
		"/api/v1/namespaces/default/configmaps/one?dryRun=All",
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"one"}}`,
	)
	send("DELETE", "/api/v1/namespaces/default/configmaps/one?dryRun=All", "")
	send("DELETE", "/api/v1/namespaces/default/configmaps?dryRun=All", "")
	send(
		"POST",
		"/api/v1/namespaces/default/pods?dryRun=All",
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"n"},`+
			`"spec":{"nodeName":"n1","containers":[{"name":"c","image":"i"}]}}`,
	)
	send("POST", "/api/v1/namespaces/default/pods/here/exec?command=x", "")
	send(
		"POST",
		"/api/v1/namespaces/default/serviceaccounts/robot/token?dryRun=All",
		`{"apiVersion":"authentication.k8s.io/v1","kind":"TokenRequest",`+
			`"spec":{"boundObjectRef":{"apiVersion":"v1","kind":"Pod","name":"here"}}}`,
	)
	send(
		"POST",
		"/apis/certificates.k8s.io/v1/certificatesigningrequests?dryRun=All",
		`{"apiVersion":"certificates.k8s.io/v1","kind":"CertificateSigningRequest","metadata":{"name":"x"},`+
			`"spec":{"request":"eA==","signerName":"a.example.com/b","usages":["client auth"]}}`,
	)
	const rbac = "/apis/rbac.authorization.k8s.io/v1/"
	role := func(kind, name, rules string) string {
		return fmt.Sprintf(
			`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":%q,"metadata":{"name":%q},"rules":%s}`,
			kind,
			name,
			rules,
		)
	}
	for _, rules := range []string{`[{"apiGroups":[""],"resources":["secrets"],"verbs":["get"]}]`,
		`[{"apiGroups":[""],"resources":["configmaps"],"resourceNames":["one"],"verbs":["get"]}]`,
		`[{"apiGroups":["*"],"resources":["*"],"verbs":["*"]}]`,
		`[{"apiGroups":[""],"resources":["pods"],"verbs":["get","list"]}]`} {
		send("POST", rbac+"namespaces/default/roles?dryRun=All", role("Role", "r", rules))
		send("POST", rbac+"namespaces/other/roles?dryRun=All", role("Role", "r", rules))
		send("POST", rbac+"clusterroles?dryRun=All", role("ClusterRole", "r", rules))
		send("PUT", rbac+"clusterroles/part?dryRun=All", role("ClusterRole", "part", rules))
	}
	send(
		"POST",
		rbac+"clusterroles?dryRun=All",
		`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRole","metadata":{"name":"agg"},`+
			`"aggregationRule":{"clusterRoleSelectors":[{"matchLabels":{"gather":"yes"}}]},"rules":[]}`,
	)
	for _, to := range []string{"reader", "one-map", "cluster-admin", "view", "absent"} {
		body := fmt.Sprintf(
			`"metadata":{"name":"b"},`+
				`"roleRef":{"apiGroup":"rbac.authorization.k8s.io","kind":"ClusterRole","name":%q},`+
				`"subjects":[{"apiGroup":"rbac.authorization.k8s.io","kind":"User","name":"x"}]}`,
			to,
		)
		for _, ns := range []string{"default", "other"} {
			send(
				"POST",
				rbac+"namespaces/"+ns+"/rolebindings?dryRun=All",
				`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"RoleBinding",`+body,
			)
		}
		send(
			"POST",
			rbac+"clusterrolebindings?dryRun=All",
			`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"ClusterRoleBinding",`+body,
		)
	}
	for _, ns := range []string{"default", "other", "absent", ""} {
		send(
			"POST",
			"/apis/authorization.k8s.io/v1/selfsubjectrulesreviews",
			fmt.Sprintf(
				`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectRulesReview","spec":{"namespace":%q}}`,
				ns,
			),
		)
	}
	for _, spec := range reviewed {
		send(
			"POST",
			"/apis/authorization.k8s.io/v1/selfsubjectaccessreviews",
			`{"apiVersion":"authorization.k8s.io/v1","kind":"SelfSubjectAccessReview","spec":{`+spec+`}}`,
		)
	}
	return all
}
