// Package admission runs the admission chain: upstream's own plugins, webhooks and CEL policies, in kube-apiserver's
// order. It does not store objects and does not call other services.
//
// Only the gateway calls it, on behalf of registry. Admit may change an object, and Validate may reject it.
// AdmissionRules streams the operations and resources that any plugin in the chain handles. Registry requests admission
// only for matching writes, and for every write until the gateway has received the rules.
//
// The plugins read the cluster as clients of the gateway, with the service's own identity. While webhooks and policies
// are not fresh, admission returns UNAVAILABLE for the writes that they might reject. The gateway then responds 503.
// Writes of the system's own services continue, so that the control plane can recover.
//
// Goroutines: Run starts the informers, the computation of the rules and the reset of the mapper, and waits for them.
// Each review runs in its gRPC handler's goroutine.
//
// # Review notes
//
// Check in every change:
//   - builtInRules covers every default plugin. TestRulesCoverEveryPlugin runs each plugin over everything that the
//     rules omit. Repeat it after each upgrade of Kubernetes.
//   - trackAges lists every resource that decides a review, except pods, nodes, classes, CRDs and parameters. A
//     resource that is missing there may be stale without an error. The index of OpenAPI documents is not listed: it
//     is up to 5 s old, as in kube-apiserver. While no MutatingAdmissionPolicy exists it may be a minute old, and a new
//     policy renews it (indexHold).
//   - A rule with ValidateInAdmit is valid only if registry's changes between Admit and the write do not affect
//     validation.
//   - Texts of rejections are kube-apiserver's, byte for byte.
//
// Never:
//   - Narrow the rules by a policy's match. A ValidatingAdmissionPolicy may match anything, so a policy widens its
//     phase to all rules.
//   - Review from stale webhook configurations or policies, except for the system's own services.
//   - Count a client's own timeout or cancellation as a webhook's failure.
//   - Request admission for the SubjectAccessReviews that admission itself creates. A webhook's match condition would
//     then review its own question.
//
// Why the obvious alternatives fail:
//   - Admission of every write: ConfigMaps, Secrets, Events, EndpointSlices, Leases and most status updates would need
//     a call that changes nothing.
//   - Direct calls from admission to authz: services do not call each other, and upstream's CEL library uses
//     context.TODO().
//   - A timeout for each webhook: a chain of dead webhooks with failurePolicy Ignore still delays every write by the
//     sum of them. A budget bounds the sum.
package admission
