package admission

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/initializer"
	"k8s.io/apiserver/pkg/admission/plugin/namespace/lifecycle"
	mutatingpolicy "k8s.io/apiserver/pkg/admission/plugin/policy/mutating"
	mutatingwebhook "k8s.io/apiserver/pkg/admission/plugin/webhook/mutating"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/util/compatibility"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/kubernetes/plugin/pkg/admission/noderestriction"

	"watershed.dev/platform/admissionrules"
	"watershed.dev/platform/apiclient"
	"watershed.dev/platform/egress"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/warnings"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// expectedReads are the attributes that a plugin reads of every request before it decides whether to handle it. The
// tests cover a node and another user. The generic plugins act by configuration, which compute adds.
var expectedReads = map[string][]string{
	noderestriction.PluginName: {"user"},
	mutatingwebhook.PluginName: {"reinvocation", "object"}, // for a reinvocation
	mutatingpolicy.PluginName:  {"reinvocation"},
}

// fixtures are clusters as the plugins read them.
var fixtures = map[string]cluster{
	// a cluster with data for every decision of a plugin
	"full": {
		"/api/v1/namespaces": {`{"metadata":{"name":"x","labels":{"kubernetes.io/metadata.name":"x",
			"pod-security.kubernetes.io/enforce":"restricted","pod-security.kubernetes.io/warn":"restricted",
			"pod-security.kubernetes.io/audit":"restricted"}},"status":{"phase":"Active"}}`,
			`{"metadata":{"name":"kube-system"},"status":{"phase":"Active"}}`,
			`{"metadata":{"name":"kube-node-lease"},"status":{"phase":"Active"}}`},
		"/api/v1/serviceaccounts": {`{"metadata":{"name":"default","namespace":"x"}}`,
			`{"metadata":{"name":"default","namespace":"kube-system"}}`,
			`{"metadata":{"name":"default","namespace":"kube-node-lease"}}`},
		"/api/v1/limitranges": {`{"metadata":{"name":"l","namespace":"x"},"spec":{"limits":[
			{"type":"Container","default":{"cpu":"2"},"max":{"cpu":"4"}}]}}`},
		"/api/v1/resourcequotas": {`{"metadata":{"name":"q","namespace":"x"},"spec":{"hard":
			{"count/n.example.com":"1"}},"status":
			{"hard":{"count/n.example.com":"1"},"used":{"count/n.example.com":"0"}}}`},
		"/api/v1/nodes": {`{"metadata":{"name":"one","labels":{"topology.kubernetes.io/zone":"z"}}}`},
		"/apis/storage.k8s.io/v1/storageclasses": {`{"metadata":{"name":"s","annotations":
			{"storageclass.kubernetes.io/is-default-class":"true"}}}`},
		"/apis/networking.k8s.io/v1/ingressclasses": {`{"metadata":{"name":"i","annotations":
			{"ingressclass.kubernetes.io/is-default-class":"true"}}}`},
		"/apis/scheduling.k8s.io/v1/priorityclasses": {`{"metadata":{"name":"p"},"value":1,"globalDefault":true}`},
	},
	"terminating": {"/api/v1/namespaces": {`{"metadata":{"name":"x"},"status":{"phase":"Terminating"}}`,
		`{"metadata":{"name":"kube-system"},"status":{"phase":"Terminating"}}`,
		`{"metadata":{"name":"kube-node-lease"},"status":{"phase":"Terminating"}}`}},
	// a cluster without objects, even without the namespace
	"empty": {},
}

var users = []user.Info{
	&user.DefaultInfo{Name: "jane", Groups: []string{user.AllAuthenticated}},
	&user.DefaultInfo{Name: "system:node:one", Groups: []string{user.NodesGroup, user.AllAuthenticated}},
}

// plugins returns the default plugins and NodeRestriction, by name.
func plugins(t *testing.T, c cluster) map[string]admission.Interface {
	t.Helper()
	rc, err := apiclient.Config(c.kubeconfig(t), "admission")
	if err != nil {
		t.Fatal(err)
	}
	rc.QPS = -1
	client, dyn := kubernetes.NewForConfigOrDie(rc), dynamic.NewForConfigOrDie(rc)
	f := informers.NewSharedInformerFactory(client, 0)
	resolver, err := apiclient.NewServiceResolver(f, false)
	if err != nil {
		t.Fatal(err)
	}
	s := &Service{
		cluster:   &apiclient.Cluster{Client: client},
		informers: f,
		resolver:  resolver,
		mapper:    newMapper(client.Discovery()),
	}
	initializers, err := s.initializers(rest.CopyConfig(rc), egress.Selector{})
	if err != nil {
		t.Fatal(err)
	}
	deny := authorizer.AuthorizerFunc(func(context.Context, authorizer.Attributes) (
		authorizer.Decision, string, error) {
		return authorizer.DecisionDeny, "", nil
	})
	chain := append(admission.PluginInitializers{initializer.New(client, dyn, f, deny, utilfeature.DefaultFeatureGate,
		compatibility.DefaultBuildEffectiveVersion(), t.Context().Done(), s.mapper)}, initializers...)
	chain = append(chain, s.mapper)
	options := NewConfig().Options.GenericAdmission
	out := map[string]admission.Interface{}
	for _, name := range options.RecommendedPluginOrder {
		if options.DefaultOffPlugins.Has(name) && name != noderestriction.PluginName {
			continue
		}
		if out[name], err = options.Plugins.InitPlugin(name, nil, chain); err != nil {
			t.Fatal(name, err)
		}
	}
	f.Start(t.Context().Done())
	for typ, ok := range f.WaitForCacheSync(t.Context().Done()) {
		if !ok {
			t.Fatal(typ)
		}
	}
	return out
}

const (
	admits    = "Admit"
	validates = "Validate"
)

// runPlugin runs one phase of a plugin and describes its effect; empty if there is none.
func runPlugin(t *testing.T, plugin, phase string, p admission.Interface, r served, op admission.Operation, namespace,
	object string, u user.Info) (out string) {
	t.Helper()
	var run func(context.Context, admission.Attributes, admission.ObjectInterfaces) error
	if m, ok := p.(admission.MutationInterface); ok && phase == admits {
		run = m.Admit
	} else if v, ok := p.(admission.ValidationInterface); ok && phase == validates {
		run = v.Validate
	} else {
		return ""
	}
	if !p.Handles(op) {
		return ""
	}
	obj, o := objectOf(r.kind)
	var old runtime.Object
	var options runtime.Object
	switch op {
	case admission.Create:
		options = &metav1.CreateOptions{}
	case admission.Update:
		old, options = obj.DeepCopyObject(), &metav1.UpdateOptions{}
	case admission.Delete:
		obj, old, options = nil, obj, &metav1.DeleteOptions{}
	}
	a := &spy{
		Attributes: admission.NewAttributesRecord(obj, old, r.kind, namespace, object, r.resource, r.subresource, op,
			options, false, u),
		reads: map[string]bool{},
	}
	ctx, warned := warnings.WithRecorder(audit.WithAuditContext(
		request.WithUser(request.WithNamespace(t.Context(), namespace), u)))
	audit.AuditContextFrom(ctx).Init(audit.RequestAuditConfig{Level: auditinternal.LevelMetadata}, nil)
	defer func() {
		if p := recover(); p != nil { // it expected another type
			out = fmt.Sprint("panics: ", p)
		}
	}()
	err := run(ctx, a, o)
	for _, expected := range expectedReads[plugin] {
		delete(a.reads, expected)
	}
	if admissionrules.IsOwnNode(identity.UserProto(u), object) { // a node's own object is exempt
		delete(a.reads, "name")
	}
	switch {
	case err != nil:
		return "refuses: " + err.Error()
	case len(warned.List()) > 0:
		return "warns"
	case len(audit.AuditContextFrom(ctx).GetEventAnnotations()) > 0:
		return "annotates"
	case len(a.reads) > 0:
		return "reads " + strings.Join(slices.Sorted(maps.Keys(a.reads)), ", ")
	}
	return ""
}

// callbackRequired reports whether registry requests admission; otherwise it runs the plugin itself.
func callbackRequired(plugin, phase string, all []*admissionv1.AdmissionRule, r served, op admission.Operation,
	namespace, object string, u user.Info) bool {
	resource := &commonv1.Resource{Group: r.resource.Group, Resource: r.resource.Resource, Subresource: r.subresource}
	flag := (*admissionv1.AdmissionRule).GetValidateInAdmit // a write with it requests Validate too
	if phase == admits {
		flag = (*admissionv1.AdmissionRule).GetNamespaceLifecycleOnly
	}
	ops, flagged := admissionrules.Operations(all, resource, namespace, object, identity.UserProto(u), flag)
	if plugin == lifecycle.PluginName || phase == validates {
		ops = append(ops, flagged...)
	}
	return slices.ContainsFunc(ops, func(o admissionv1.Operation) bool { return operations[o] == op })
}

// The rules omit nothing that a plugin handles, because a plugin without a request cannot act.
func TestRulesCoverEveryPlugin(t *testing.T) {
	for name, gates := range map[string]map[string]bool{
		"as they are": {},
		"every gate":  {"AllAlpha": true, "AllBeta": true},
	} {
		t.Run(name, func(t *testing.T) {
			setGates(t, gates)
			checkEveryRule(t)
		})
	}
}

func setGates(t *testing.T, gates map[string]bool) {
	gate := utilfeature.DefaultMutableFeatureGate
	state := func() map[string]bool {
		enabled := map[string]bool{}
		for f := range gate.GetAll() {
			enabled[string(f)] = gate.Enabled(f)
		}
		return enabled
	}
	before := state()
	if err := gate.SetFromMap(gates); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for f := range gates { // then each gate separately
			_ = gate.SetFromMap(map[string]bool{f: false})
		}
		back := map[string]bool{}
		for f, on := range state() {
			if before[f] != on {
				back[f] = before[f]
			}
		}
		if err := gate.SetFromMap(back); err != nil || !maps.Equal(state(), before) {
			t.Errorf("the feature gates are not restored: %v", err)
		}
	})
}

func checkEveryRule(t *testing.T) {
	all := everyResource(t)
	missing := map[string]map[string]string{} // effects by plugin, by "phase operation resource"
	for _, c := range fixtures {
		by := plugins(t, maps.Clone(c))
		admit, validate := builtInRules()
		if c["/api/v1/resourcequotas"] != nil {
			validate = append(validate, quotaRules([]string{"x"})...)
		}
		rulesByPhase := map[string][]*admissionv1.AdmissionRule{admits: admit, validates: validate}
		for _, r := range all {
			namespaces := []string{""}
			if r.namespaced {
				namespaces = []string{"x", metav1.NamespaceSystem, "kube-node-lease"}
			} else if r.resource.Resource == "namespaces" {
				namespaces = []string{"", "x"} // registry's handlers differ by operation
			}
			checkPlugins := func(phase string, op admission.Operation, namespace, object string, u user.Info) {
				for name, p := range by {
					if callbackRequired(name, phase, rulesByPhase[phase], r, op, namespace, object, u) {
						continue
					}
					effect := runPlugin(t, name, phase, p, r, op, namespace, object, u)
					if effect == "" {
						continue
					}
					key := fmt.Sprintf("%-8s %-6s %s as %s", phase, op, r, u.GetName())
					if missing[key] == nil {
						missing[key] = map[string]string{}
					}
					missing[key][name] = effect
				}
			}
			for _, op := range slices.Compact(append(slices.Clone(r.ops), admission.Connect)) {
				for _, phase := range []string{admits, validates} {
					for _, u := range users {
						for _, ns := range namespaces {
							checkPlugins(phase, op, ns, "n", u)
							checkPlugins(phase, op, ns, "one", u)
						}
					}
				}
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(missing)) {
		t.Errorf("no rule covers %s: %v", key, missing[key])
	}
}
