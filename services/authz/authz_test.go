package authz

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/metrics/legacyregistry"
	kubeoptions "k8s.io/kubernetes/pkg/kubeapiserver/options"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/reload"
	"watershed.dev/platform/reload/reloadtest"
)

// hook is an authorization webhook with a configurable response.
type hook struct {
	allow, broken atomic.Bool
	calls         atomic.Int32
	kubeconfig    string
}

func newHook(t *testing.T) *hook {
	h := &hook{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h.calls.Add(1)
		if h.broken.Load() {
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		var r map[string]any
		_ = json.NewDecoder(req.Body).Decode(&r)
		r["status"] = map[string]any{"allowed": h.allow.Load()}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(r)
	}))
	t.Cleanup(srv.Close)
	h.kubeconfig = filepath.Join(t.TempDir(), "webhook")
	err := os.WriteFile(h.kubeconfig, []byte(fmt.Sprintf(`{"apiVersion":"v1","kind":"Config","current-context":"c",
"clusters":[{"name":"c","cluster":{"server":%q}}],
"users":[{"name":"u","user":{}}],"contexts":[{"name":"c","context":{"cluster":"c","user":"u"}}]}`, srv.URL)), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	return h
}

func chainOf(t *testing.T, set func(*kubeoptions.BuiltInAuthorizationOptions), cluster ...runtime.Object) *chain {
	t.Helper()
	return chainWith(t, &reload.Files{}, set, cluster...)
}

func chainWith(t *testing.T, files *reload.Files, set func(*kubeoptions.BuiltInAuthorizationOptions),
	cluster ...runtime.Object) *chain {
	t.Helper()
	o := kubeoptions.NewBuiltInAuthorizationOptions()
	set(o)
	if errs := append(o.Complete(), o.Validate()...); len(errs) > 0 {
		t.Fatal(errors.Join(errs...))
	}
	f := informers.NewSharedInformerFactory(fake.NewClientset(cluster...), 0)
	c, err := o.ToAuthorizationConfig(f)
	if err != nil {
		t.Fatal(err)
	}
	h, err := newChain(t.Context(), c, files, func() {})
	if err != nil {
		t.Fatal(err)
	}
	f.Start(t.Context().Done())
	f.WaitForCacheSync(t.Context().Done())
	return h
}

func attributesOf(name string, groups ...string) authorizer.AttributesRecord {
	return authorizer.AttributesRecord{
		User:            &user.DefaultInfo{Name: name, Groups: groups},
		Verb:            "list",
		ResourceRequest: true,
		Resource:        "pods",
		Namespace:       "x",
	}
}

// Only the webhook authorizer itself caches a webhook's decision, and nothing is cached while an authorizer returns an
// error (S3).
func TestAWebhooksDecisionIsNotCached(t *testing.T) {
	h := newHook(t)
	c := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes, o.WebhookConfigFile = []string{"RBAC", "Webhook"}, h.kubeconfig
		o.WebhookCacheAuthorizedTTL, o.WebhookCacheUnauthorizedTTL = 0, 0
		o.WebhookRetryBackoff.Steps = 1
	})
	h.allow.Store(true)
	if d, _, cacheable, err := c.decide(t.Context(), attributesOf("bob")); d != authorizer.DecisionAllow || cacheable ||
		err != nil {
		t.Errorf("%v, cacheable %v, %v", d, cacheable, err)
	}
	h.allow.Store(false)
	if d, _, cacheable, _ := c.decide(t.Context(), attributesOf("bob")); d == authorizer.DecisionAllow || cacheable {
		t.Errorf("%v, cacheable %v: the webhook revoked it", d, cacheable)
	}
	h.broken.Store(true)
	if d, _, cacheable, err := c.decide(t.Context(), attributesOf("eve")); d == authorizer.DecisionAllow || cacheable ||
		err == nil {
		t.Errorf("%v, cacheable %v, %v: while it returns errors", d, cacheable, err)
	}
}

func TestADecisionWithoutAWebhookIsCached(t *testing.T) {
	c := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) { o.Modes = []string{"RBAC", "AlwaysAllow"} })
	if d, _, cacheable, err := c.decide(t.Context(), attributesOf("bob")); d != authorizer.DecisionAllow ||
		!cacheable || err != nil {
		t.Errorf("%v, cacheable %v, %v", d, cacheable, err)
	}
}

// A changed configuration is applied and reported. An invalid one leaves the old one in force (S3).
func TestAConfigurationIsReloaded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "authz.yaml")
	write := func(types ...string) {
		text := "# a comment\napiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n"
		for _, x := range types {
			text += "- {type: " + x + ", name: " + map[string]string{
				"RBAC":        "rbac",
				"AlwaysAllow": "alwaysallow",
				"AlwaysDeny":  "alwaysdeny",
				"Node":        "node",
			}[x] + "}\n"
		}
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func() []byte {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	write("RBAC")
	c := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) { o.AuthorizationConfigurationFile = file })
	reloads := 0
	c.onReload = func() { reloads++ }
	const reloadMetric = "apiserver_authorization_config_controller_automatic_reloads_total"
	counted := counterOf(t, reloadMetric)
	decided := func() authorizer.Decision {
		d, _, _, _ := c.decide(t.Context(), attributesOf("bob"))
		return d
	}
	if err := c.reload(t.Context(), read()); err != nil || reloads != 0 || decided() == authorizer.DecisionAllow {
		t.Errorf("unchanged: %v, %d reloads", err, reloads)
	}
	if err := c.reload(t.Context(), bytes.Replace(read(), []byte("a comment"), []byte("another"), 1)); err != nil ||
		reloads != 0 || counterOf(t, reloadMetric) != counted {
		t.Errorf("another comment: %v, %d reloads", err, reloads)
	}
	write("RBAC", "AlwaysAllow")
	if err := c.reload(t.Context(), read()); err != nil || reloads != 1 || decided() != authorizer.DecisionAllow ||
		counterOf(t, reloadMetric) != counted+1 {
		t.Errorf("changed: %v, %d reloads, %v", err, reloads, decided())
	}
	for _, bad := range [][]string{{"AlwaysAllow"}, {"RBAC", "Node"}, {"RBAC", "Nonsense"}} {
		write(bad...)
		if err := c.reload(t.Context(), read()); err == nil || reloads != 1 || decided() != authorizer.DecisionAllow {
			t.Errorf("%v: %v, %d reloads", bad, err, reloads)
		}
	}
}

// counterOf returns the sum of a counter of Kubernetes' libraries over its labels.
func counterOf(t *testing.T, name string) (sum float64) {
	t.Helper()
	families, err := legacyregistry.DefaultGatherer.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue()
			}
		}
	}
	return sum
}

// An invalid kubeconfig of a webhook does not affect the kubeconfig of another webhook.
func TestKubeconfigsAreReloadedSeparately(t *testing.T) {
	first, second, replacement := newHook(t), newHook(t), newHook(t)
	text := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\nauthorizers:\n"
	for i, h := range []*hook{first, second} {
		text += fmt.Sprintf("- {type: Webhook, name: hook%d, webhook: {timeout: 3s, subjectAccessReviewVersion: v1, "+
			"matchConditionSubjectAccessReviewVersion: v1, failurePolicy: NoOpinion, authorizedTTL: 1s, "+
			"unauthorizedTTL: 1s, connectionInfo: {type: KubeConfigFile, kubeConfigFile: %q}}}\n", i, h.kubeconfig)
	}
	file := filepath.Join(t.TempDir(), "authz.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	c := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) { o.AuthorizationConfigurationFile = file })
	if err := os.WriteFile(first.kubeconfig, []byte("nonsense"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(replacement.kubeconfig, second.kubeconfig); err != nil {
		t.Fatal(err)
	}
	if c.rebuild(t.Context(), first.kubeconfig) == nil {
		t.Error("an invalid kubeconfig is applied")
	}
	if err := c.rebuild(t.Context(), second.kubeconfig); err != nil {
		t.Errorf("the other kubeconfig is not applied: %v", err)
	}
	_, _, _, _ = c.decide(t.Context(), attributesOf("bob"))
	if first.calls.Load() != 1 || second.calls.Load() != 0 || replacement.calls.Load() != 1 {
		t.Errorf("the webhooks are called %d, %d and %d times", first.calls.Load(), second.calls.Load(),
			replacement.calls.Load())
	}
}

// A wildcard decision holds for every name or namespace.
func TestWildcardDecisionsMatchThePolicy(t *testing.T) {
	meta := func(name, namespace string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Name: name, Namespace: namespace}
	}
	rules := func(names ...string) []rbacv1.PolicyRule {
		return []rbacv1.PolicyRule{{
			Verbs: []string{"get"}, APIGroups: []string{""}, Resources: []string{"pods"}, ResourceNames: names,
		}}
	}
	to := func(user string) []rbacv1.Subject { return []rbacv1.Subject{{Kind: "User", Name: user}} }
	role := func(name string) rbacv1.RoleRef {
		return rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: name}
	}
	policy := []runtime.Object{
		&rbacv1.ClusterRole{ObjectMeta: meta("all", ""), Rules: rules()},
		&rbacv1.ClusterRole{ObjectMeta: meta("one", ""), Rules: rules("one")},
		&rbacv1.ClusterRole{ObjectMeta: meta("none-or-one", ""), Rules: rules("", "one")}, // a name may be empty
		&rbacv1.ClusterRoleBinding{
			ObjectMeta: meta("g", ""),
			RoleRef:    role("none-or-one"),
			Subjects:   to("none-or-one"),
		},
		&rbacv1.RoleBinding{ObjectMeta: meta("h", "x"), RoleRef: role("none-or-one"), Subjects: to("none-or-one-in-x")},
		&rbacv1.ClusterRoleBinding{ObjectMeta: meta("a", ""), RoleRef: role("all"), Subjects: to("everywhere")},
		&rbacv1.ClusterRoleBinding{ObjectMeta: meta("b", ""), RoleRef: role("one"), Subjects: to("one-everywhere")},
		&rbacv1.RoleBinding{ObjectMeta: meta("c", "x"), RoleRef: role("all"), Subjects: to("in-x")},
		&rbacv1.RoleBinding{ObjectMeta: meta("d", "x"), RoleRef: role("one"), Subjects: to("one-in-x")},
		&rbacv1.ClusterRoleBinding{ObjectMeta: meta("e", ""), RoleRef: role("one"), Subjects: to("both")},
		&rbacv1.RoleBinding{ObjectMeta: meta("f", "x"), RoleRef: role("all"), Subjects: to("both")},
	}
	abac := filepath.Join(t.TempDir(), "policy.jsonl")
	if err := os.WriteFile(abac, []byte(`{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy",`+
		`"spec":{"user":"unset","resource":"pods","apiGroup":""}}`+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	h := newHook(t)
	rbac := chainOf(
		t,
		func(o *kubeoptions.BuiltInAuthorizationOptions) { o.Modes = []string{"Node", "RBAC"} },
		policy...)
	lines := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes, o.PolicyFile = []string{"ABAC", "RBAC"}, abac
	}, policy...)
	webhookFirst := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes, o.WebhookConfigFile = []string{"Webhook", "RBAC"}, h.kubeconfig
	}, policy...)
	webhookLast := chainOf(t, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes, o.WebhookConfigFile = []string{"RBAC", "Webhook"}, h.kubeconfig
	}, policy...)
	for _, x := range []struct {
		chain         *chain
		user          string
		name, anyname bool
	}{
		{rbac, "everywhere", true, true},
		{rbac, "one-everywhere", false, false},
		{rbac, "none-or-one", false, false},
		{rbac, "none-or-one-in-x", false, false},
		{rbac, "in-x", true, false},
		{rbac, "one-in-x", false, false},
		{rbac, "both", true, false},
		{lines, "everywhere", true, false}, // a line without a namespace is for cluster-scoped objects
		{webhookLast, "in-x", true, false},
		{webhookLast, "one-in-x", false, false},
		// the last: the webhook is called for the decision, and for no probe
		{webhookFirst, "everywhere", false, false},
	} {
		if calls := h.calls.Load(); calls != 0 {
			t.Errorf("%s: the webhook was called %d times", x.user, calls)
		}
		a := attributesOf(x.user)
		a.Verb, a.Name = "get", "one"
		if d, _, _, err := x.chain.decide(t.Context(), a); d != authorizer.DecisionAllow || err != nil {
			t.Errorf("%s: %v, %v", x.user, d, err)
		}
		counted := counterOf(t, "apiserver_authorization_decisions_total")
		name, everywhere, reason := x.chain.wildcard(t.Context(), a)
		if counterOf(t, "apiserver_authorization_decisions_total") != counted {
			t.Errorf("%s: a probe is counted as a decision", x.user)
		}
		if name != x.name || everywhere != x.anyname {
			t.Errorf("%s: every name %v, every namespace %v", x.user, name, everywhere)
		}
		if x.user == "both" && !strings.Contains(reason, `RoleBinding "f/x"`) {
			t.Errorf("%s: the reason for other names is %q", x.user, reason)
		}
	}
}

// A changed ABAC file is applied soon and increments the policy revision. An invalid file leaves the old one in force.
func TestAPolicyFileIsReloaded(t *testing.T) {
	file := filepath.Join(t.TempDir(), "policy.jsonl")
	const line = `{"apiVersion":"abac.authorization.kubernetes.io/v1beta1","kind":"Policy",` +
		`"spec":{"user":%q,"namespace":"*","resource":"*","apiGroup":"*"}}` + "\n"
	reloadtest.Replace(t, file, fmt.Sprintf(line, "eve"))
	files := &reload.Files{}
	c := chainWith(t, files, func(o *kubeoptions.BuiltInAuthorizationOptions) {
		o.Modes, o.PolicyFile = []string{"RBAC", "ABAC"}, file
	})
	moved := make(chan struct{}, 10)
	c.onReload = func() { moved <- struct{}{} }
	reloadtest.Watch(t, files)
	decided := func() authorizer.Decision {
		d, _, _, _ := c.decide(t.Context(), attributesOf("bob"))
		return d
	}
	if decided() == authorizer.DecisionAllow {
		t.Error("bob is allowed before the file is changed")
	}
	reloadtest.Replace(t, file, fmt.Sprintf(line, "bob"))
	reloadtest.Until(t, "the generation moves", func() bool { return len(moved) > 0 })
	<-moved
	if decided() != authorizer.DecisionAllow {
		t.Error("bob is denied")
	}
	reloadtest.Replace(t, file, "nonsense\n")
	reloadtest.WaitForPage(t, files, "refused")
	if decided() != authorizer.DecisionAllow || len(moved) > 0 {
		t.Error("an invalid file was applied")
	}
}

// The system's services have the permissions of serviceRules. Other users have none by the same names.
func TestServiceRules(t *testing.T) {
	secrets := func(name, selector string, groups ...string) authorizer.Attributes {
		a := attributesOf(name, groups...)
		a.Resource, a.Namespace = "secrets", ""
		if selector != "" {
			a.FieldSelectorRequirements = fields.ParseSelectorOrDie(selector).Requirements()
		}
		return a
	}
	attributes := func(name, verb, group, resource string) authorizer.Attributes {
		a := attributesOf(name, identity.ServicesGroup)
		a.Verb, a.APIGroup, a.Resource = verb, group, resource
		return a
	}
	for title, x := range map[string]struct {
		a    authorizer.Attributes
		want bool
	}{
		"authn's token secrets": {secrets(identity.Authn, "type=kubernetes.io/service-account-token",
			identity.ServicesGroup), true},
		"authn's other secrets": {secrets(identity.Authn, "type=Opaque", identity.ServicesGroup), false},
		"secrets that are not of a type": {secrets(identity.Authn, "type!=kubernetes.io/service-account-token",
			identity.ServicesGroup), false},
		"all secrets": {secrets(identity.Authn, "", identity.ServicesGroup), false},
		"authn's name without the group": {secrets(identity.Authn, "type=kubernetes.io/service-account-token"),
			false},
		"the group without a name": {secrets("mallory", "type=kubernetes.io/service-account-token",
			identity.ServicesGroup), false},
		"authz reads roles":        {attributes(identity.Authz, "watch", "rbac.authorization.k8s.io", "roles"), true},
		"authz writes roles":       {attributes(identity.Authz, "create", "rbac.authorization.k8s.io", "roles"), false},
		"authz reads secrets":      {attributes(identity.Authz, "list", "", "secrets"), false},
		"admission reads anything": {attributes(identity.Admission, "get", "example.com", "parameters"), true},
		"admission writes pods":    {attributes(identity.Admission, "create", "", "pods"), false},
		"admission binds cluster roles": {attributes(identity.Admission, "create", "rbac.authorization.k8s.io",
			"clusterrolebindings"), false},
		"admission creates an access review": {attributes(identity.Admission, "create", "authorization.k8s.io",
			"subjectaccessreviews"), true},
		"registry reads pods":    {attributes(identity.Registry, "get", "", "pods"), false},
		"registry creates pods":  {attributes(identity.Registry, "create", "", "pods"), false},
		"admission impersonates": {attributes(identity.Admission, "impersonate", "", "users"), false},
	} {
		if got, _ := serviceAllowed(x.a); got != x.want {
			t.Errorf("%s: %v", title, got)
		}
	}
	subresource := attributesOf(identity.Admission, identity.ServicesGroup)
	subresource.Verb, subresource.APIGroup, subresource.Subresource = "create", "admission.example.com", "proxy"
	for title, x := range map[string]struct {
		a    authorizer.Attributes
		want bool
	}{
		"an aggregated server's review": {attributes(identity.Admission, "create", "admission.example.com", "reviews"),
			true},
		"a conversion review": {attributes(identity.Registry, "create", "conversion.example.com", "reviews"), true},
		"a CRD": {attributes(identity.Registry, "create", "apiextensions.k8s.io", "customresourcedefinitions"),
			false},
		"a pod":         {attributes(identity.Admission, "create", "", "pods"), false},
		"a binding":     {attributes(identity.Admission, "create", "rbac.authorization.k8s.io", "rolebindings"), false},
		"another verb":  {attributes(identity.Admission, "update", "admission.example.com", "reviews"), false},
		"a subresource": {subresource, false},
		"authz' review": {attributes(identity.Authz, "create", "admission.example.com", "reviews"), false},
	} {
		if got := isGrantable(x.a); got != x.want {
			t.Errorf("%s is grantable: %v", title, got)
		}
	}
}

func TestChangesAreSentByNamespace(t *testing.T) {
	g := newPolicyRevisions()
	h := g.eventHandler()
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "mine", ResourceVersion: "1"}}
	newer := role.DeepCopy()
	newer.ResourceVersion = "2"
	began := g.current()
	h.OnAdd(role, false)
	h.OnUpdate(role, role) // a resync
	h.OnUpdate(role, newer)
	h.OnDelete(cache.DeletedFinalStateUnknown{Obj: newer})
	h.OnDelete(&rbacv1.ClusterRoleBinding{})
	changes, reset, _ := g.after(began)
	got := ""
	for _, c := range changes {
		got += fmt.Sprintf("%s/%v ", c.Namespace, c.MayRevoke)
	}
	if got != "mine/false mine/true mine/true /true " || reset != nil {
		t.Errorf("%q", got)
	}
	for range 2 * maxChanges {
		g.record("x", true)
	}
	if changes, reset, _ := g.after(began); reset == nil || !reset.MayRevoke || reset.Namespace != "" ||
		len(changes) > 0 {
		t.Error("a stream that is too slow does not receive a reset")
	}
}
