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

// builtIn is what the default plugins and NodeRestriction look at, from their own Handles and Admit methods at 1.36.
// Where any other plugin is on, everything is asked. TestInterestsHoldWhatPluginsLookAt runs every plugin over
// everything that is left out.
//
// Above all that is ConfigMaps, Secrets, Events, EndpointSlices, Leases and their heartbeats, and most status updates:
// at them NamespaceLifecycle alone looks, which registry runs itself. What ResourceQuota looks at beside, compute adds:
// everything that is created where a namespace has a quota.
func builtIn() (admit, validate []*admissionv1.AdmissionRule) {
	const (
		create = admissionv1.Operation_OPERATION_CREATE
		update = admissionv1.Operation_OPERATION_UPDATE
		remove = admissionv1.Operation_OPERATION_DELETE
	)
	in := func(group, resource, subresource string, ops ...admissionv1.Operation) *admissionv1.AdmissionRule {
		return &admissionv1.AdmissionRule{
			Group:       group,
			Resource:    resource,
			Subresource: subresource,
			Operations:  ops,
		}
	}
	// ofNodes is what NodeRestriction looks at: what nodes do.
	ofNodes := func(i *admissionv1.AdmissionRule) *admissionv1.AdmissionRule {
		i.UserGroup = user.NodesGroup
		return i
	}
	heartbeats := ofNodes(in("coordination.k8s.io", "leases", "", update, remove))
	heartbeats.ExceptOwnObjectIn = corev1.NamespaceNodeLease // a node's own, which it may write
	inRegistry := func(i *admissionv1.AdmissionRule) *admissionv1.AdmissionRule {
		i.NamespaceLifecycleOnly = true
		return i
	}
	// atOnce is what may be validated as soon as it is admitted: registry sets a pod's status in between, and copies
	// AppArmor's annotations and fields into each other, of which PodSecurity reads both.
	atOnce := func(i *admissionv1.AdmissionRule) *admissionv1.AdmissionRule {
		i.ValidateInAdmit = true
		return i
	}
	admit = []*admissionv1.AdmissionRule{
		inRegistry(in("*", "*", "*", create, update)),
		in("", "namespaces", "", remove),   // NamespaceLifecycle, which looks twice at a namespace that it saw deleted
		in("", "pods", "", create, update), // ServiceAccount, Priority, DefaultTolerationSeconds and more
		in("", "pods", "binding", create),  // PodTopologyLabels
		in("", "pods", "ephemeralcontainers", create, update),
		in("", "pods", "resize", create, update), // LimitRanger
		in("", "nodes", "", create),              // TaintNodesByCondition
		// StorageObjectInUseProtection, DefaultStorageClass
		in("", "persistentvolumes", "", create),
		in("", "persistentvolumeclaims", "", create, update),
		in("storage.k8s.io", "volumeattributesclasses", "", create),
		in("networking.k8s.io", "ingresses", "", create), // DefaultIngressClass
		in("scheduling.k8s.io", "podgroups", "", create), // PodGroupProtection, Priority
		ofNodes(in("", "pods", "*", create, update, remove)),
		ofNodes(in("", "nodes", "*", create, update, remove)),
		ofNodes(in("", "persistentvolumeclaims", "*", create, update, remove)),
		ofNodes(in("", "serviceaccounts", "token", create)),
		ofNodes(in("certificates.k8s.io", "certificatesigningrequests", "*", create)),
		ofNodes(in("certificates.k8s.io", "podcertificaterequests", "*", create, update, remove)),
		heartbeats,
		ofNodes(in("coordination.k8s.io", "leases", "", create)),
		ofNodes(in("resource.k8s.io", "resourceslices", "", create, remove)),
		ofNodes(in("storage.k8s.io", "csinodes", "", create, update, remove)),
	}
	validate = []*admissionv1.AdmissionRule{
		// PodSecurity: pods, and what holds a template of one
		in("", "namespaces", "", create, update),
		atOnce(in("", "pods", "", create)),
		in("", "pods", "", update),
		in("", "pods", "ephemeralcontainers", create, update), // ServiceAccount
		in("", "pods", "resize", create, update),              // PodResizeValidator, LimitRanger, ResourceQuota
		in("", "podtemplates", "", create, update),
		in("", "replicationcontrollers", "", create, update),
		in("apps", "*", "", create, update),
		in("batch", "*", "", create, update), // JobValidation
		// ResourceQuota, LimitRanger, PersistentVolumeClaimResize
		in("", "persistentvolumeclaims", "*", create, update),
		in("", "services", "", update),
		in("resource.k8s.io", "resourceclaims", "", update),
		in("scheduling.k8s.io", "priorityclasses", "", create, update),              // Priority
		in("scheduling.k8s.io", "podgroups", "", create),                            // PodGroupWorkloadExists
		in("certificates.k8s.io", "certificatesigningrequests", "", create),         // CertificateSubjectRestriction
		in("certificates.k8s.io", "certificatesigningrequests", "approval", update), // CertificateApproval
		in("certificates.k8s.io", "certificatesigningrequests", "status", update),   // CertificateSigning
		in("certificates.k8s.io", "clustertrustbundles", "*", create, update),       // ClusterTrustBundleAttest
	}
	return admit, validate
}

// quotaNamespaces bounds how many namespaces an interest names; beyond, it is one in all of them.
const quotaNamespaces = 1000

// counted is what ResourceQuota looks at where there are quotas: whatever is created there.
func counted(namespaces []string) []*admissionv1.AdmissionRule {
	if len(namespaces) == 0 {
		return nil
	}
	in := &admissionv1.AdmissionRule{
		Group:      "*",
		Resource:   "*",
		Operations: []admissionv1.Operation{admissionv1.Operation_OPERATION_CREATE},
	}
	if len(namespaces) <= quotaNamespaces {
		slices.Sort(namespaces)
		in.Namespaces = slices.Compact(namespaces)
	}
	return []*admissionv1.AdmissionRule{in}
}

// interests is the built-in list and what quotas, webhooks and policies add to it.
type interests struct {
	mutating   admissionlisters.MutatingWebhookConfigurationLister
	validating admissionlisters.ValidatingWebhookConfigurationLister
	policies   admissionlisters.ValidatingAdmissionPolicyLister
	mutations  admissionlisters.MutatingAdmissionPolicyLister
	quotas     corelisters.ResourceQuotaLister
	// all: plugins beyond the default are on, so that everything is asked.
	all    bool
	synced []cache.InformerSynced
	dirty  chan struct{}

	current watchable.Value[*admissionv1.AdmissionRuleSet]
}

// everything is asked until the webhooks and policies are known.
func everything() *admissionv1.AdmissionRuleSet {
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

func newInterests(f informers.SharedInformerFactory, all bool) *interests {
	a := f.Admissionregistration().V1()
	i := &interests{
		mutating:   a.MutatingWebhookConfigurations().Lister(),
		validating: a.ValidatingWebhookConfigurations().Lister(),
		policies:   a.ValidatingAdmissionPolicies().Lister(),
		mutations:  a.MutatingAdmissionPolicies().Lister(),
		quotas:     f.Core().V1().ResourceQuotas().Lister(),
		all:        all,
		dirty:      make(chan struct{}, 1),
	}
	i.current.Set(everything())
	touch := func(any) {
		select {
		case i.dirty <- struct{}{}:
		default:
		}
	}
	quotas := f.Core().V1().ResourceQuotas().Informer()
	reg, err := quotas.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: touch, DeleteFunc: touch})
	if err == nil {
		i.synced = append(i.synced, reg.HasSynced)
	}
	for _, inf := range []cache.SharedIndexInformer{a.MutatingWebhookConfigurations().Informer(),
		a.ValidatingWebhookConfigurations().Informer(),
		a.ValidatingAdmissionPolicies().Informer(), a.MutatingAdmissionPolicies().Informer()} {
		reg, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    touch,
			UpdateFunc: func(_, o any) { touch(o) },
			DeleteFunc: touch,
		})
		if err == nil {
			i.synced = append(i.synced, reg.HasSynced)
		}
	}
	return i
}

func (i *interests) run(ctx context.Context) {
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

func (i *interests) compute() *admissionv1.AdmissionRuleSet {
	if i.all {
		return everything()
	}
	s := &admissionv1.AdmissionRuleSet{}
	s.Admit, s.Validate = builtIn()
	var namespaces []string
	quotas, _ := i.quotas.List(labels.Everything())
	for _, q := range quotas {
		namespaces = append(namespaces, q.Namespace)
	}
	s.Validate = append(s.Validate, counted(namespaces)...)
	mutating, _ := i.mutating.List(labels.Everything())
	for _, c := range mutating {
		for _, w := range c.Webhooks {
			s.Admit = append(s.Admit, rules(w.Rules)...)
		}
	}
	validating, _ := i.validating.List(labels.Everything())
	for _, c := range validating {
		for _, w := range c.Webhooks {
			s.Validate = append(s.Validate, rules(w.Rules)...)
		}
	}
	if policies, _ := i.policies.List(labels.Everything()); len(policies) > 0 {
		s.Validate = everything().Validate // a policy's match may be anything
	}
	if policies, _ := i.mutations.List(labels.Everything()); len(policies) > 0 {
		s.Admit = everything().Admit
	}
	return s
}

// rules widens a webhook's rules to interests: any resource of its groups.
func rules(all []admissionregistrationv1.RuleWithOperations) (out []*admissionv1.AdmissionRule) {
	for _, r := range all {
		in := &admissionv1.AdmissionRule{Resource: "*", Subresource: "*"}
		for _, op := range r.Operations {
			switch op {
			case admissionregistrationv1.OperationAll:
				in.Operations = everything().Admit[0].Operations
			case admissionregistrationv1.Create:
				in.Operations = append(in.Operations, admissionv1.Operation_OPERATION_CREATE)
			case admissionregistrationv1.Update:
				in.Operations = append(in.Operations, admissionv1.Operation_OPERATION_UPDATE)
			case admissionregistrationv1.Delete:
				in.Operations = append(in.Operations, admissionv1.Operation_OPERATION_DELETE)
			case admissionregistrationv1.Connect:
				in.Operations = append(in.Operations, admissionv1.Operation_OPERATION_CONNECT)
			}
		}
		in.Group = "*" // matchPolicy Equivalent may mean another group
		out = append(out, in)
	}
	return out
}
