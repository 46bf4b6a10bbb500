package admission

import (
	"context"
	"slices"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	admissionlisters "k8s.io/client-go/listers/admissionregistration/v1"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/watchable"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
)

// builtInRules returns the rules of the default plugins and NodeRestriction, from their Handles and Admit methods at
// 1.36. If any other plugin is enabled, every write needs admission. TestRulesCoverEveryPlugin runs every plugin over
// everything that the rules omit.
//
// They omit above all ConfigMaps, Secrets, Events, EndpointSlices, Leases and their heartbeats, and most status
// updates. Only NamespaceLifecycle handles those, and registry runs it. compute adds the rules of ResourceQuota: every
// creation in a namespace with a quota.
func builtInRules() (admit, validate []*admissionv1.AdmissionRule) {
	const (
		create = admissionv1.Operation_OPERATION_CREATE
		update = admissionv1.Operation_OPERATION_UPDATE
		remove = admissionv1.Operation_OPERATION_DELETE
	)
	heartbeats := nodesOnly(rule("coordination.k8s.io", "leases", "", update, remove))
	heartbeats.ExceptOwnObjectIn = corev1.NamespaceNodeLease // a node may write its own lease
	admit = []*admissionv1.AdmissionRule{
		namespaceLifecycleOnly(rule("*", "*", "*", create, update)),
		rule("", "namespaces", "", remove),   // NamespaceLifecycle, which checks a recently deleted namespace again
		rule("", "pods", "", create, update), // ServiceAccount, Priority, DefaultTolerationSeconds and more
		rule("", "pods", "binding", create),  // PodTopologyLabels
		rule("", "pods", "ephemeralcontainers", create, update),
		rule("", "pods", "resize", create, update), // LimitRanger
		rule("", "nodes", "", create),              // TaintNodesByCondition
		// StorageObjectInUseProtection, DefaultStorageClass
		rule("", "persistentvolumes", "", create),
		rule("", "persistentvolumeclaims", "", create, update),
		rule("storage.k8s.io", "volumeattributesclasses", "", create),
		rule("networking.k8s.io", "ingresses", "", create), // DefaultIngressClass
		rule("scheduling.k8s.io", "podgroups", "", create), // PodGroupProtection, Priority
		nodesOnly(rule("", "pods", "*", create, update, remove)),
		nodesOnly(rule("", "nodes", "*", create, update, remove)),
		nodesOnly(rule("", "persistentvolumeclaims", "*", create, update, remove)),
		nodesOnly(rule("", "serviceaccounts", "token", create)),
		nodesOnly(rule("certificates.k8s.io", "certificatesigningrequests", "*", create)),
		nodesOnly(rule("certificates.k8s.io", "podcertificaterequests", "*", create, update, remove)),
		heartbeats,
		nodesOnly(rule("coordination.k8s.io", "leases", "", create)),
		nodesOnly(rule("resource.k8s.io", "resourceslices", "", create, remove)),
		nodesOnly(rule("storage.k8s.io", "csinodes", "", create, update, remove)),
	}
	validate = []*admissionv1.AdmissionRule{
		// PodSecurity: pods, and the resources with a pod template
		rule("", "namespaces", "", create, update),
		validateInAdmit(rule("", "pods", "", create)),
		rule("", "pods", "", update),
		rule("", "pods", "ephemeralcontainers", create, update), // ServiceAccount
		rule("", "pods", "resize", create, update),              // PodResizeValidator, LimitRanger, ResourceQuota
		rule("", "podtemplates", "", create, update),
		rule("", "replicationcontrollers", "", create, update),
		rule("apps", "*", "", create, update),
		rule("batch", "*", "", create, update), // JobValidation
		// ResourceQuota, LimitRanger, PersistentVolumeClaimResize
		rule("", "persistentvolumeclaims", "*", create, update),
		rule("", "services", "", update),
		rule("resource.k8s.io", "resourceclaims", "", update),
		rule("scheduling.k8s.io", "priorityclasses", "", create, update),              // Priority
		rule("scheduling.k8s.io", "podgroups", "", create),                            // PodGroupWorkloadExists
		rule("certificates.k8s.io", "certificatesigningrequests", "", create),         // CertificateSubjectRestriction
		rule("certificates.k8s.io", "certificatesigningrequests", "approval", update), // CertificateApproval
		rule("certificates.k8s.io", "certificatesigningrequests", "status", update),   // CertificateSigning
		rule("certificates.k8s.io", "clustertrustbundles", "*", create, update),       // ClusterTrustBundleAttest
	}
	return admit, validate
}

// rule returns a rule without further conditions.
func rule(group, resource, subresource string, ops ...admissionv1.Operation) *admissionv1.AdmissionRule {
	return &admissionv1.AdmissionRule{Group: group, Resource: resource, Subresource: subresource, Operations: ops}
}

// namespaceLifecycleOnly marks a rule that applies only to NamespaceLifecycle, which registry can run itself.
func namespaceLifecycleOnly(r *admissionv1.AdmissionRule) *admissionv1.AdmissionRule {
	r.NamespaceLifecycleOnly = true
	return r
}

// nodesOnly restricts a rule to requests of nodes, which NodeRestriction handles.
func nodesOnly(r *admissionv1.AdmissionRule) *admissionv1.AdmissionRule {
	r.UserGroup = user.NodesGroup
	return r
}

// validateInAdmit marks a rule whose objects may be validated in Admit. Registry sets a pod's status afterwards and
// copies AppArmor's annotations and fields into each other; PodSecurity reads both annotations and fields.
func validateInAdmit(r *admissionv1.AdmissionRule) *admissionv1.AdmissionRule {
	r.ValidateInAdmit = true
	return r
}

// quotaNamespaces bounds the namespaces of a rule. With more, the rule applies to all namespaces.
const quotaNamespaces = 1000

// quotaRules returns the rule of ResourceQuota: every creation in the namespaces, which have quotas.
func quotaRules(namespaces []string) []*admissionv1.AdmissionRule {
	if len(namespaces) == 0 {
		return nil
	}
	rule := &admissionv1.AdmissionRule{
		Group:      "*",
		Resource:   "*",
		Operations: []admissionv1.Operation{admissionv1.Operation_OPERATION_CREATE},
	}
	if len(namespaces) <= quotaNamespaces {
		slices.Sort(namespaces)
		rule.Namespaces = slices.Compact(namespaces)
	}
	return []*admissionv1.AdmissionRule{rule}
}

// admissionRules computes the rules of the built-in plugins, quotas, webhooks and policies.
type admissionRules struct {
	mutating           admissionlisters.MutatingWebhookConfigurationLister
	validating         admissionlisters.ValidatingWebhookConfigurationLister
	validatingPolicies admissionlisters.ValidatingAdmissionPolicyLister
	mutatingPolicies   admissionlisters.MutatingAdmissionPolicyLister
	quotas             corelisters.ResourceQuotaLister
	// matchAll: plugins beyond the default are enabled, so every write needs admission.
	matchAll bool
	synced   []cache.InformerSynced
	dirty    chan struct{}

	current watchable.Value[*admissionv1.AdmissionRuleSet]
}

// matchAllRules returns rules that match every write. They apply until the webhooks and policies have been read.
func matchAllRules() *admissionv1.AdmissionRuleSet {
	all := []*admissionv1.AdmissionRule{{
		Group:       "*",
		Resource:    "*",
		Subresource: "*",
		Operations: []admissionv1.Operation{
			admissionv1.Operation_OPERATION_CREATE, admissionv1.Operation_OPERATION_UPDATE,
			admissionv1.Operation_OPERATION_DELETE, admissionv1.Operation_OPERATION_CONNECT},
	}}
	return &admissionv1.AdmissionRuleSet{Admit: all, Validate: all}
}

func newAdmissionRules(f informers.SharedInformerFactory, matchAll bool) *admissionRules {
	a := f.Admissionregistration().V1()
	i := &admissionRules{
		mutating:           a.MutatingWebhookConfigurations().Lister(),
		validating:         a.ValidatingWebhookConfigurations().Lister(),
		validatingPolicies: a.ValidatingAdmissionPolicies().Lister(),
		mutatingPolicies:   a.MutatingAdmissionPolicies().Lister(),
		quotas:             f.Core().V1().ResourceQuotas().Lister(),
		matchAll:           matchAll,
		dirty:              make(chan struct{}, 1),
	}
	i.current.Set(matchAllRules())
	markDirty := func(any) {
		select {
		case i.dirty <- struct{}{}:
		default:
		}
	}
	quotas := f.Core().V1().ResourceQuotas().Informer()
	reg, err := quotas.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: markDirty, DeleteFunc: markDirty})
	if err == nil {
		i.synced = append(i.synced, reg.HasSynced)
	}
	for _, inf := range []cache.SharedIndexInformer{a.MutatingWebhookConfigurations().Informer(),
		a.ValidatingWebhookConfigurations().Informer(),
		a.ValidatingAdmissionPolicies().Informer(), a.MutatingAdmissionPolicies().Informer()} {
		reg, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    markDirty,
			UpdateFunc: func(_, o any) { markDirty(o) },
			DeleteFunc: markDirty,
		})
		if err == nil {
			i.synced = append(i.synced, reg.HasSynced)
		}
	}
	return i
}

func (i *admissionRules) run(ctx context.Context) {
	if !cache.WaitForCacheSync(ctx.Done(), i.synced...) {
		return
	}
	for {
		i.current.Set(i.compute())
		select {
		case <-ctx.Done():
			return
		case <-i.dirty:
		}
	}
}

func (i *admissionRules) compute() *admissionv1.AdmissionRuleSet {
	if i.matchAll {
		return matchAllRules()
	}
	s := &admissionv1.AdmissionRuleSet{}
	s.Admit, s.Validate = builtInRules()
	var namespaces []string
	quotas, _ := i.quotas.List(labels.Everything())
	for _, q := range quotas {
		namespaces = append(namespaces, q.Namespace)
	}
	s.Validate = append(s.Validate, quotaRules(namespaces)...)
	mutating, _ := i.mutating.List(labels.Everything())
	for _, c := range mutating {
		for _, w := range c.Webhooks {
			s.Admit = append(s.Admit, webhookRules(w.Rules)...)
		}
	}
	validating, _ := i.validating.List(labels.Everything())
	for _, c := range validating {
		for _, w := range c.Webhooks {
			s.Validate = append(s.Validate, webhookRules(w.Rules)...)
		}
	}
	if policies, _ := i.validatingPolicies.List(labels.Everything()); len(policies) > 0 {
		s.Validate = matchAllRules().Validate // a policy may match anything
	}
	if policies, _ := i.mutatingPolicies.List(labels.Everything()); len(policies) > 0 {
		s.Admit = matchAllRules().Admit
	}
	return s
}

// webhookRules converts a webhook's rules to wider admission rules: any resource of any group.
func webhookRules(all []admissionregistrationv1.RuleWithOperations) (out []*admissionv1.AdmissionRule) {
	for _, r := range all {
		rule := &admissionv1.AdmissionRule{Resource: "*", Subresource: "*"}
		for _, op := range r.Operations {
			switch op {
			case admissionregistrationv1.OperationAll:
				rule.Operations = matchAllRules().Admit[0].Operations
			case admissionregistrationv1.Create:
				rule.Operations = append(rule.Operations, admissionv1.Operation_OPERATION_CREATE)
			case admissionregistrationv1.Update:
				rule.Operations = append(rule.Operations, admissionv1.Operation_OPERATION_UPDATE)
			case admissionregistrationv1.Delete:
				rule.Operations = append(rule.Operations, admissionv1.Operation_OPERATION_DELETE)
			case admissionregistrationv1.Connect:
				rule.Operations = append(rule.Operations, admissionv1.Operation_OPERATION_CONNECT)
			}
		}
		rule.Group = "*" // matchPolicy Equivalent may match another group
		out = append(out, rule)
	}
	return out
}
