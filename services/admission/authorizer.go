package admission

import (
	"context"
	"errors"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes"
)

// remoteAuthorizer sends SubjectAccessReviews to the gateway, because services do not call each other. Upstream's CEL
// library uses context.TODO() (k8s.io/apiserver/pkg/cel/library/authz.go), so a review has no link to the request that
// caused it. The gateway does not request admission of these reviews (gateway/routing, isSelfReview). Otherwise a
// webhook whose match condition authorizes would review its own question.
type remoteAuthorizer struct{ client kubernetes.Interface }

// Authorize implements authorizer.Authorizer.
func (r remoteAuthorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	got, err := r.client.AuthorizationV1().SubjectAccessReviews().Create(ctx, reviewOf(a), metav1.CreateOptions{})
	if err != nil {
		return authorizer.DecisionDeny, "", err
	}
	if e := got.Status.EvaluationError; e != "" {
		err = errors.New(e)
	}
	switch {
	case got.Status.Allowed:
		return authorizer.DecisionAllow, got.Status.Reason, err
	case got.Status.Denied:
		return authorizer.DecisionDeny, got.Status.Reason, err
	}
	return authorizer.DecisionNoOpinion, got.Status.Reason, err
}

func reviewOf(a authorizer.Attributes) *authorizationv1.SubjectAccessReview {
	u := a.GetUser()
	review := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{
		User:   u.GetName(),
		UID:    u.GetUID(),
		Groups: u.GetGroups(),
	}}
	for k, v := range u.GetExtra() {
		if review.Spec.Extra == nil {
			review.Spec.Extra = map[string]authorizationv1.ExtraValue{}
		}
		review.Spec.Extra[k] = v
	}
	if !a.IsResourceRequest() {
		review.Spec.NonResourceAttributes = &authorizationv1.NonResourceAttributes{Path: a.GetPath(), Verb: a.GetVerb()}
		return review
	}
	review.Spec.ResourceAttributes = &authorizationv1.ResourceAttributes{
		Namespace:     a.GetNamespace(),
		Verb:          a.GetVerb(),
		Group:         a.GetAPIGroup(),
		Version:       a.GetAPIVersion(),
		Resource:      a.GetResource(),
		Subresource:   a.GetSubresource(),
		Name:          a.GetName(),
		FieldSelector: fieldSelector(a),
		LabelSelector: labelSelector(a),
	}
	return review
}

// fieldSelector returns the request's field selector if it is valid. Without it an authorizer can only allow less.
func fieldSelector(a authorizer.Attributes) *authorizationv1.FieldSelectorAttributes {
	all, err := a.GetFieldSelector()
	if err != nil || len(all) == 0 {
		return nil
	}
	out := &authorizationv1.FieldSelectorAttributes{}
	for _, r := range all {
		out.Requirements = append(out.Requirements, fieldRequirement(r))
	}
	return out
}

func fieldRequirement(r fields.Requirement) metav1.FieldSelectorRequirement {
	op := metav1.FieldSelectorOpIn
	if r.Operator == selection.NotEquals {
		op = metav1.FieldSelectorOpNotIn
	}
	return metav1.FieldSelectorRequirement{Key: r.Field, Operator: op, Values: []string{r.Value}}
}

func labelSelector(a authorizer.Attributes) *authorizationv1.LabelSelectorAttributes {
	all, err := a.GetLabelSelector()
	if err != nil || len(all) == 0 {
		return nil
	}
	out := &authorizationv1.LabelSelectorAttributes{}
	for _, r := range all {
		req, ok := labelRequirement(r)
		if !ok { // the requirements of the API have no operator "greater than" or "less than"
			return &authorizationv1.LabelSelectorAttributes{RawSelector: labels.NewSelector().Add(all...).String()}
		}
		out.Requirements = append(out.Requirements, req)
	}
	return out
}

func labelRequirement(r labels.Requirement) (metav1.LabelSelectorRequirement, bool) {
	ops := map[selection.Operator]metav1.LabelSelectorOperator{
		selection.In: metav1.LabelSelectorOpIn, selection.Equals: metav1.LabelSelectorOpIn,
		selection.DoubleEquals: metav1.LabelSelectorOpIn,
		selection.NotIn:        metav1.LabelSelectorOpNotIn, selection.NotEquals: metav1.LabelSelectorOpNotIn,
		selection.Exists: metav1.LabelSelectorOpExists, selection.DoesNotExist: metav1.LabelSelectorOpDoesNotExist,
	}
	op, ok := ops[r.Operator()]
	return metav1.LabelSelectorRequirement{Key: r.Key(), Operator: op, Values: r.ValuesUnsorted()}, ok
}
