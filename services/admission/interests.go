package admission

import (
	"context"

	admissionregistrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/informers"
	admissionlisters "k8s.io/client-go/listers/admissionregistration/v1"
	"k8s.io/client-go/tools/cache"

	"watershed.dev/platform/watchable"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
)

// builtIn is what the default plugins and NodeRestriction look at, from their own Handles and Admit methods at 1.36.
// Where any other plugin is on, everything is asked. TestInterestsHoldWhatPluginsLookAt runs every plugin over
// everything that is left out.
//
// Above all that is a Lease's heartbeat, an Event's and an EndpointSlice's update and most status updates. One thing is
// left out that a plugin would act on: NamespaceLifecycle refuses an update of an object whose namespace is gone, which
// only what is left behind by a deletion that was not finished can be.
func builtIn() (admit, validate []*admissionv1.Interest) {
	const (
		create = admissionv1.Operation_OPERATION_CREATE
		update = admissionv1.Operation_OPERATION_UPDATE
		remove = admissionv1.Operation_OPERATION_DELETE
	)
	in := func(group, resource, subresource string, ops ...admissionv1.Operation) *admissionv1.Interest {
		return &admissionv1.Interest{
			Group:       group,
			Resource:    resource,
			Subresource: subresource,
			Operations:  ops,
		}
	}
	// ofNodes is what NodeRestriction looks at: what nodes do.
	ofNodes := func(i *admissionv1.Interest) *admissionv1.Interest {
		i.UserGroup = user.NodesGroup
		return i
	}
	heartbeats := ofNodes(in("coordination.k8s.io", "leases", "", update, remove))
	heartbeats.UnlessOwnIn = corev1.NamespaceNodeLease // a node's own, which it may write
	admit = []*admissionv1.Interest{
		in("*", "*", "*", create),        // NamespaceLifecycle: whatever is created in a namespace
		in("", "namespaces", "", remove), // NamespaceLifecycle
		in("", "pods", "", update),       // DefaultTolerationSeconds
		in("", "pods", "ephemeralcontainers", update),
		in("", "pods", "resize", update), // LimitRanger
		in("", "persistentvolumeclaims", "", update),
		ofNodes(in("", "pods", "*", update, remove)),
		ofNodes(in("", "nodes", "*", update, remove)),
		ofNodes(in("", "persistentvolumeclaims", "*", update, remove)),
		ofNodes(in("certificates.k8s.io", "podcertificaterequests", "*", update, remove)),
		heartbeats,
		ofNodes(in("resource.k8s.io", "resourceslices", "", remove)),
		ofNodes(in("storage.k8s.io", "csinodes", "", update, remove)),
	}
	validate = []*admissionv1.Interest{
		in("*", "*", "", create), // ResourceQuota counts whatever is created in a namespace
		// PodSecurity: pods, and what holds a template of one
		in("", "namespaces", "", update),
		in("", "pods", "", update),
		in("", "pods", "ephemeralcontainers", create, update), // ServiceAccount
		in("", "pods", "resize", create, update),              // PodResizeValidator, LimitRanger, ResourceQuota
		in("", "podtemplates", "", update),
		in("", "replicationcontrollers", "", update),
		in("apps", "*", "", update),
		in("batch", "*", "", update), // JobValidation
		// ResourceQuota, LimitRanger, PersistentVolumeClaimResize
		in("", "persistentvolumeclaims", "*", create, update),
		in("", "services", "", update),
		in("resource.k8s.io", "resourceclaims", "", update),
		in("scheduling.k8s.io", "priorityclasses", "", update),                      // Priority
		in("certificates.k8s.io", "certificatesigningrequests", "approval", update), // CertificateApproval
		in("certificates.k8s.io", "certificatesigningrequests", "status", update),   // CertificateSigning
		in("certificates.k8s.io", "clustertrustbundles", "*", update),               // ClusterTrustBundleAttest
	}
	return admit, validate
}

// interests is the built-in list and what webhooks and policies add to it.
type interests struct {
	mutating   admissionlisters.MutatingWebhookConfigurationLister
	validating admissionlisters.ValidatingWebhookConfigurationLister
	policies   admissionlisters.ValidatingAdmissionPolicyLister
	mutations  admissionlisters.MutatingAdmissionPolicyLister
	// all: plugins beyond the default are on, so that everything is asked.
	all    bool
	synced []cache.InformerSynced
	dirty  chan struct{}

	current watchable.Value[*admissionv1.InterestSet]
}

// everything is asked until the webhooks and policies are known.
func everything() *admissionv1.InterestSet {
	all := []*admissionv1.Interest{{
		Group:       "*",
		Resource:    "*",
		Subresource: "*",
		Operations: []admissionv1.Operation{
			admissionv1.Operation_OPERATION_CREATE, admissionv1.Operation_OPERATION_UPDATE,
			admissionv1.Operation_OPERATION_DELETE, admissionv1.Operation_OPERATION_CONNECT},
	}}
	return &admissionv1.InterestSet{Admit: all, Validate: all}
}

func newInterests(f informers.SharedInformerFactory, all bool) *interests {
	a := f.Admissionregistration().V1()
	i := &interests{
		mutating:   a.MutatingWebhookConfigurations().Lister(),
		validating: a.ValidatingWebhookConfigurations().Lister(),
		policies:   a.ValidatingAdmissionPolicies().Lister(),
		mutations:  a.MutatingAdmissionPolicies().Lister(),
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

func (i *interests) compute() *admissionv1.InterestSet {
	if i.all {
		return everything()
	}
	s := &admissionv1.InterestSet{}
	s.Admit, s.Validate = builtIn()
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
func rules(all []admissionregistrationv1.RuleWithOperations) (out []*admissionv1.Interest) {
	for _, r := range all {
		in := &admissionv1.Interest{Resource: "*", Subresource: "*"}
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
