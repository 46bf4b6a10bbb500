package main

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"watershed.dev/test/harness"
)

// authorizers compares authorization decisions under chains of authorizers.
func (x *axes) authorizers() {
	for _, m := range []string{"AlwaysAllow", "ABAC,Webhook,Node,RBAC", "RBAC,AlwaysDeny"} {
		x.configuration("authorizers "+m, harness.Twins, func(a *axis, dir string, w *web) []string {
			return a.modes(m, dir, w)
		}, func(a *axis, p *pair, _ *web, _ string) {
			a.everyRight(p, strings.Contains(m, "RBAC"), strings.Contains(m, "Node"))
		})
	}
	x.configuration("authorizers by configuration", harness.Twins, func(a *axis, dir string, w *web) []string {
		w.authorizer("/authorize")
		path := filepath.Join(dir, "authorization.yaml")
		write(a.t, path, fmt.Sprintf(authorization, a.webhookKubeconfig(dir, "authorizer", w, "/authorize"),
			a.webhookKubeconfig(dir, "dead", &web{base: "https://127.0.0.1:1", ca: w.ca}, "/")))
		return append(a.users(dir), "--authorization-config="+path)
	}, func(a *axis, p *pair, _ *web, _ string) { a.everyRight(p, true, true) })
}

// modes writes the files of authorization modes, and returns the flags that name them.
func (a *axis) modes(modes, dir string, w *web) []string {
	w.authorizer("/authorize")
	write(a.t, filepath.Join(dir, "abac.jsonl"), abac)
	flags := append(a.users(dir), "--authorization-mode="+modes)
	if strings.Contains(modes, "ABAC") {
		flags = append(flags, "--authorization-policy-file="+filepath.Join(dir, "abac.jsonl"))
	}
	if strings.Contains(modes, "Webhook") {
		flags = append(flags,
			"--authorization-webhook-config-file="+a.webhookKubeconfig(dir, "authorizer", w, "/authorize"),
			"--authorization-webhook-version=v1")
	}
	return flags
}

// users writes the users' tokens, and returns the flags of the authenticators.
func (a *axis) users(dir string) []string {
	write(a.t, filepath.Join(dir, "tokens.csv"), `alice,alice,1,"readers"
bob,bob,2
carol,carol,3,"editors,hooked"
node,system:node:n1,4,system:nodes
nodeless,n1,5,system:nodes
robot,system:serviceaccount:default:robot,6,"system:serviceaccounts,system:serviceaccounts:default"
root,root,7,system:masters
`)
	return []string{"--token-auth-file=" + filepath.Join(dir, "tokens.csv"), "--anonymous-auth=true"}
}

// abac is a policy file of lines (k8s.io/kubernetes/pkg/apis/abac).
//
//go:embed abac.jsonl
var abac string

// authorization is an AuthorizationConfiguration with two webhooks. One of them is unreachable.
const authorization = `apiVersion: apiserver.config.k8s.io/v1
kind: AuthorizationConfiguration
authorizers:
- type: Webhook
  name: first
  webhook:
    timeout: 3s
    authorizedTTL: 30s
    unauthorizedTTL: 30s
    subjectAccessReviewVersion: v1
    matchConditionSubjectAccessReviewVersion: v1
    failurePolicy: NoOpinion
    connectionInfo: {type: KubeConfigFile, kubeConfigFile: %s}
    matchConditions:
    - expression: "has(request.resourceAttributes)"
    - expression: "request.resourceAttributes.namespace == 'default'"
    - expression: "!('system:masters' in request.groups)"
- type: Webhook
  name: away
  webhook:
    timeout: 1s
    authorizedTTL: 30s
    unauthorizedTTL: 30s
    subjectAccessReviewVersion: v1
    matchConditionSubjectAccessReviewVersion: v1
    failurePolicy: Deny
    connectionInfo: {type: KubeConfigFile, kubeConfigFile: %s}
    matchConditions:
    - expression: "has(request.resourceAttributes) && request.resourceAttributes.resource == 'endpoints'"
    - expression: "request.user == 'carol' || request.resourceAttributes.fieldSelector.rawSelector == ''"
- type: Node
  name: node
- type: RBAC
  name: rbac
`

// authorizer makes the server an authorization webhook below a path.
func (w *web) authorizer(path string) {
	w.HandleFunc(path, func(rw http.ResponseWriter, req *http.Request) {
		var r authorizationv1.SubjectAccessReview
		_ = json.NewDecoder(req.Body).Decode(&r)
		if ra := r.Spec.ResourceAttributes; ra != nil {
			switch {
			case ra.Resource == "services":
				http.Error(rw, "broken", http.StatusInternalServerError)
				return
			case ra.Resource == "secrets" && ra.Name == "hooked":
				r.Status = authorizationv1.SubjectAccessReviewStatus{Allowed: true, Reason: "the hook likes it"}
			case ra.Resource == "pods" && r.Spec.User == "carol":
				r.Status = authorizationv1.SubjectAccessReviewStatus{Denied: true, Reason: "the hook does not"}
			case ra.FieldSelector != nil || ra.LabelSelector != nil:
				text, _ := json.Marshal([]any{ra.FieldSelector, ra.LabelSelector})
				r.Status = authorizationv1.SubjectAccessReviewStatus{
					Allowed: r.Spec.User == "carol",
					Reason:  string(text),
				}
			case ra.Resource == "events":
				r.Status = authorizationv1.SubjectAccessReviewStatus{Reason: "unsure", EvaluationError: "it erred"}
			}
		} else if r.Spec.NonResourceAttributes.Path == "/metrics" {
			r.Status = authorizationv1.SubjectAccessReviewStatus{Allowed: r.Spec.User == "carol"}
		}
		rw.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(rw).Encode(&r)
	})
}

// policy holds RBAC objects, and the objects from which nodes get their rights.
//
//go:embed policy.yaml
var policy string

// everyRight sends every request as every user.
func (a *axis) everyRight(p *pair, rbac, nodes bool) {
	for _, s := range []*side{p.theirs, p.ours} {
		a.prepare(s, rbac, nodes)
	}
	for _, user := range []string{"alice", "bob", "carol", "node", "nodeless", "robot", "root", ""} {
		for _, r := range rights() {
			variant := *r
			variant.as, variant.about = noCertificate, "as "+user
			variant.header = merged(map[string]string{}, r.header)
			if user != "" {
				variant.header["Authorization"] = "Bearer " + user
			}
			p.askLater(&variant)
		}
	}
	a.impersonation(p)
	a.accessReviews(p)
}

// prepare creates the policy, and waits until it is in force.
func (a *axis) prepare(s *side, rbac, nodes bool) {
	a.t.Helper()
	// A binding takes effect only if its role exists, so the server's bootstrap roles must exist first.
	harness.Eventually(a.t, harness.Soon, func() error {
		if !rbac {
			return nil
		}
		_, err := s.server.Client().
			RbacV1().
			ClusterRoleBindings().
			Get(a.t.Context(), "system:basic-user", metav1.GetOptions{})
		return err
	})
	withoutEvents(a.t, s.server)
	if out, err := s.server.TryKubectl(policy, "create", "-f", "-"); err != nil {
		a.t.Fatalf("%s: %v\n%s", s.name, err, out)
	}
	harness.Eventually(a.t, harness.Soon, func() error {
		r, err := s.server.Client().AuthorizationV1().SubjectAccessReviews().Create(a.t.Context(),
			&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "last", ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: "get", Resource: "pods", Namespace: "other",
				},
			}}, metav1.CreateOptions{})
		if err == nil && !r.Status.Allowed && rbac {
			err = fmt.Errorf("%s: the last binding is not in force: %s", s.name, r.Status.Reason)
		}
		return err
	})
	node := func(name string) error {
		r, err := s.server.Client().AuthorizationV1().SubjectAccessReviews().Create(a.t.Context(),
			&authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
				User: "system:node:n1", Groups: []string{"system:nodes"},
				ResourceAttributes: &authorizationv1.ResourceAttributes{
					Verb: "get", Resource: "secrets", Namespace: "default", Name: name,
				},
			}}, metav1.CreateOptions{})
		if err == nil && !r.Status.Allowed {
			err = fmt.Errorf("%s: the node's pod is not known: %s", s.name, r.Status.Reason)
		}
		return err
	}
	if nodes {
		harness.Eventually(a.t, harness.Soon, func() error { return node("mounted") })
	}
}

// reviewed are the attributes of the access reviews.
var reviewed = []string{
	`"resourceAttributes":{"verb":"get","resource":"pods","namespace":"default","name":"here"}`,
	`"resourceAttributes":{"verb":"get","resource":"pods","version":"v1","namespace":"default"}`,
	`"resourceAttributes":{"verb":"list","resource":"pods","namespace":"default",` +
		`"fieldSelector":{"rawSelector":"spec.nodeName=n1"}}`,
	`"resourceAttributes":{"verb":"list","resource":"pods","fieldSelector":{"requirements":[{"key":"spec.nodeName",` +
		`"operator":"In","values":["n1"]}]}}`,
	`"resourceAttributes":{"verb":"list","resource":"configmaps","namespace":"default",` +
		`"labelSelector":{"rawSelector":"a in (b"}}`,
	`"resourceAttributes":{"verb":"list","resource":"configmaps","namespace":"default",` +
		`"labelSelector":{"requirements":[{"key":"a","operator":"Odd"},{"key":"b","operator":"Exists"}]}}`,
	`"resourceAttributes":{"verb":"list","resource":"configmaps","namespace":"default",` +
		`"labelSelector":{"rawSelector":"a=b","requirements":[{"key":"a","operator":"Exists"}]}}`,
	`"resourceAttributes":{"verb":"*","resource":"*","group":"*"}`,
	`"resourceAttributes":{"verb":"get","resource":"configmaps","namespace":"default","name":"one"}`,
	`"resourceAttributes":{"verb":"get","resource":"events","namespace":"default"}`,
	`"resourceAttributes":{"verb":"get","resource":"services","namespace":"default"}`,
	`"resourceAttributes":{"verb":"get","resource":"endpoints","namespace":"default"}`,
	`"resourceAttributes":{"verb":"escalate","resource":"roles","group":"rbac.authorization.k8s.io",` +
		`"namespace":"other"}`,
	`"nonResourceAttributes":{"path":"/metrics","verb":"get"}`,
	`"nonResourceAttributes":{"path":"/logs/x","verb":"get"}`,
	`"nonResourceAttributes":{"path":"/apis","verb":"post"}`,
	`"nonResourceAttributes":{"path":"","verb":""}`,
	``,
	`"resourceAttributes":{},"nonResourceAttributes":{}`,
}

// accessReviews sends the administrator's access reviews of other users.
func (a *axis) accessReviews(p *pair) {
	users := []string{
		`"user":"alice","groups":["readers"]`,
		`"user":"bob"`,
		`"groups":["editors","hooked"],"user":"carol"`,
		`"user":"system:node:n1","groups":["system:nodes"]`,
		`"user":"n1","groups":["system:nodes"]`,
		`"user":"system:serviceaccount:default:robot"`,
		`"groups":["readers"]`,
		`"user":"x","groups":["system:masters"]`,
		`"user":"x","uid":"1","extra":{"a":["b"],"C":["d"]}`,
		`"user":"system:anonymous","groups":["system:unauthenticated"]`,
		``,
	}
	for _, u := range users {
		for _, spec := range reviewed {
			body := strings.Trim(u+","+spec, ",")
			for _, to := range []string{"/apis/authorization.k8s.io/v1/subjectaccessreviews",
				"/apis/authorization.k8s.io/v1/namespaces/default/localsubjectaccessreviews"} {
				kind := "SubjectAccessReview"
				if strings.Contains(to, "local") {
					kind = "LocalSubjectAccessReview"
				}
				p.askLater(&request{
					method: http.MethodPost, path: to, about: "review of " + u,
					header: map[string]string{"Content-Type": "application/json"},
					body: fmt.Appendf(
						nil,
						`{"apiVersion":"authorization.k8s.io/v1","kind":%q,"metadata":{"namespace":%q},"spec":{%s}}`,
						kind,
						map[string]string{"LocalSubjectAccessReview": "default"}[kind],
						body,
					),
				})
			}
		}
	}
}

// impersonation checks which users may impersonate which.
func (a *axis) impersonation(p *pair) {
	for _, headers := range []http.Header{
		{"Impersonate-User": {"alice"}}, {"Impersonate-User": {"bob"}}, {"Impersonate-User": {"root"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Group": {"readers"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Group": {"readers", "editors"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Group": {"system:masters"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Uid": {"u1"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Uid": {"u2"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Extra-Scopes": {"view"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Extra-Scopes": {"view", "edit"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Extra-Other": {"view"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Extra-Acme.com%2fx": {"view"}},
		{"Impersonate-User": {"system:serviceaccount:default:robot"}},
		{"Impersonate-User": {"system:serviceaccount:other:robot"}},
		{"Impersonate-User": {"system:serviceaccount:default"}}, {"Impersonate-User": {"system:serviceaccount:"}},
		{"Impersonate-User": {"system:node:n1"}},
		{"Impersonate-User": {"system:node:n1"}, "Impersonate-Group": {"system:nodes"}},
		{"Impersonate-User": {"system:node:"}}, {"Impersonate-User": {"system:anonymous"}},
		{"Impersonate-User": {"system:anonymous"}, "Impersonate-Group": {"system:authenticated"}},
		{"Impersonate-Group": {"readers"}}, {"Impersonate-Uid": {"u1"}}, {"Impersonate-Extra-Scopes": {"view"}},
		{"Impersonate-User": {""}}, {"Impersonate-User": {"alice", "bob"}},
		{"Impersonate-User": {"alice"}, "Impersonate-Group": {""}},
		{"Impersonate-User": {"ünï"}}, {"Impersonate-User": {"alice"}, "Impersonate-Odd": {"x"}},
		{"Impersonate-User": {"system:watershed:authz"}, "Impersonate-Group": {"system:watershed"}},
	} {
		for _, username := range []string{"root", "carol", "bob", "alice", ""} {
			for _, r := range []*request{
				plain()[0], {method: http.MethodGet, path: "/api/v1/namespaces/default/configmaps/one"},
				{method: http.MethodGet, path: "/api/v1/namespaces/default/pods"},
				{method: http.MethodGet, path: "/api/v1/namespaces/default/pods/here"},
				{method: http.MethodGet, path: "/api"},
			} {
				r.as, r.about = noCertificate, fmt.Sprintf("%s impersonates %v", username, headers)
				r.more = func(*side) http.Header {
					h := headers.Clone()
					if username != "" {
						h["Authorization"] = []string{"Bearer " + username}
					}
					return h
				}
				p.askLater(r)
			}
		}
	}
}
