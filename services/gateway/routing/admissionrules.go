package routing

import (
	"context"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"

	"watershed.dev/platform/admissionrules"
	"watershed.dev/platform/rpc"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// AdmissionRules caches the admission rules, which say for which requests the admission chain needs a call. Without
// rules, every write needs a call.
type AdmissionRules struct {
	Client  admissionv1.AdmissionClient
	current atomic.Pointer[receivedRules]
}

// receivedRules are rules and the time at which the gateway has received them.
type receivedRules struct {
	*admissionv1.AdmissionRuleSet
	at time.Time
}

// rulesRetryInterval is the pause before the stream of rules is opened again.
const rulesRetryInterval = 100 * time.Millisecond

// Run receives rules until ctx ends. If the stream breaks, or has no message for admissionrules.Lease, the rules may
// have changed. Every write then needs a call until new rules arrive.
func (r *AdmissionRules) Run(ctx context.Context) {
	open := func(ctx context.Context) (grpc.ServerStreamingClient[admissionv1.AdmissionRuleSet], error) {
		return r.Client.AdmissionRules(ctx, &admissionv1.AdmissionRulesRequest{})
	}
	rpc.RetryWatch(ctx, rulesRetryInterval, open,
		func(m *admissionv1.AdmissionRuleSet, _ bool) { r.current.Store(&receivedRules{m, time.Now()}) },
		func(error) { r.current.Store(nil) })
}

var allOperations = []admissionv1.Operation{admissionv1.Operation_OPERATION_CREATE,
	admissionv1.Operation_OPERATION_UPDATE,
	admissionv1.Operation_OPERATION_DELETE, admissionv1.Operation_OPERATION_CONNECT}

// SetOperations sets the operations of a write that match an admission rule, for each phase.
func (r *AdmissionRules) SetOperations(w *registryv1.WriteRequest) {
	rules := r.current.Load()
	if rules == nil || time.Since(rules.at) > admissionrules.Lease {
		w.Admit, w.Validate = allOperations, allOperations
		return
	}
	others, lifecycle := admissionrules.Operations(rules.Admit, w.Resource, w.Namespace, w.Name, w.User,
		(*admissionv1.AdmissionRule).GetNamespaceLifecycleOnly)
	w.Admit, w.NamespaceLifecycleOnly = append(others, lifecycle...), lifecycle
	others, validateInAdmit := admissionrules.Operations(rules.Validate, w.Resource, w.Namespace, w.Name, w.User,
		(*admissionv1.AdmissionRule).GetValidateInAdmit)
	w.Validate, w.ValidateInAdmit = append(others, validateInAdmit...), validateInAdmit
}
