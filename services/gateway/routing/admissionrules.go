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

// AdmissionRules follows what the admission chain looks at. Until admission has said so, it looks at everything.
type AdmissionRules struct {
	Client  admissionv1.AdmissionClient
	current atomic.Pointer[admissionv1.AdmissionRuleSet]
}

// rulesRetryInterval is how long to wait before admission is asked again what it looks at.
const rulesRetryInterval = 100 * time.Millisecond

// Run follows until ctx is done. When the stream breaks, what admission may since have become interested in is not
// known: everything goes there again.
func (r *AdmissionRules) Run(ctx context.Context) {
	open := func(ctx context.Context) (grpc.ServerStreamingClient[admissionv1.AdmissionRuleSet], error) {
		return r.Client.AdmissionRules(ctx, &admissionv1.AdmissionRulesRequest{})
	}
	rpc.RetryWatch(ctx, rulesRetryInterval, open,
		func(m *admissionv1.AdmissionRuleSet, _ bool) { r.current.Store(m) },
		func(error) { r.current.Store(nil) })
}

var allOperations = []admissionv1.Operation{admissionv1.Operation_OPERATION_CREATE,
	admissionv1.Operation_OPERATION_UPDATE,
	admissionv1.Operation_OPERATION_DELETE, admissionv1.Operation_OPERATION_CONNECT}

// SetOperations names in a write the operations that each phase looks at.
func (r *AdmissionRules) SetOperations(w *registryv1.WriteRequest) {
	rules := r.current.Load()
	if rules == nil {
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
