package admission

import (
	"context"
	"errors"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
)

// A SubjectAccessReview of a policy's CEL expression has all its attributes, including the selectors (features F9).
func TestAnAccessReviewHasItsSelectors(t *testing.T) {
	client := fake.NewClientset()
	var created *authorizationv1.SubjectAccessReview
	reviewStatus, failure := authorizationv1.SubjectAccessReviewStatus{Allowed: true, Reason: "why"}, error(nil)
	client.PrependReactor("create", "subjectaccessreviews", func(a clienttesting.Action) (bool, runtime.Object, error) {
		created = a.(clienttesting.CreateAction).GetObject().(*authorizationv1.SubjectAccessReview)
		return true, &authorizationv1.SubjectAccessReview{Status: reviewStatus}, failure
	})
	fs, err := fields.ParseSelector("spec.nodeName=n,status.phase!=Failed")
	if err != nil {
		t.Fatal(err)
	}
	ls, err := labels.Parse("a in (b,c),!d,e!=f")
	if err != nil {
		t.Fatal(err)
	}
	reqs, _ := ls.Requirements()
	a := authorizer.AttributesRecord{
		User: &user.DefaultInfo{
			Name:   "bob",
			Groups: []string{"g"},
			Extra:  map[string][]string{"k": {"v"}},
		},
		Verb:                      "list",
		Namespace:                 "x",
		APIVersion:                "v1",
		Resource:                  "pods",
		ResourceRequest:           true,
		FieldSelectorRequirements: fs.Requirements(),
		LabelSelectorRequirements: reqs,
	}
	r := remoteAuthorizer{client}
	d, reason, err := r.Authorize(context.Background(), a)
	if d != authorizer.DecisionAllow || reason != "why" || err != nil {
		t.Errorf("%v %q %v", d, reason, err)
	}
	ra := created.Spec.ResourceAttributes
	if created.Spec.User != "bob" || created.Spec.Extra["k"][0] != "v" || ra.Namespace != "x" || ra.Resource != "pods" {
		t.Errorf("created %+v", created.Spec)
	}
	wantFields := []metav1.FieldSelectorRequirement{{
		Key:      "spec.nodeName",
		Operator: "In",
		Values:   []string{"n"},
	}, {Key: "status.phase", Operator: "NotIn", Values: []string{"Failed"}}}
	if ra.FieldSelector == nil || len(ra.FieldSelector.Requirements) != 2 ||
		ra.FieldSelector.Requirements[0].String() != wantFields[0].String() ||
		ra.FieldSelector.Requirements[1].String() != wantFields[1].String() {
		t.Errorf("field selector %+v", ra.FieldSelector)
	}
	if ra.LabelSelector == nil || len(ra.LabelSelector.Requirements) != 3 {
		t.Errorf("label selector %+v", ra.LabelSelector)
	}
	if ls, err = labels.Parse("a in (b,c),gen>3"); err != nil { // only a raw selector has the operator
		t.Fatal(err)
	}
	a.LabelSelectorRequirements, _ = ls.Requirements()
	if _, _, err := r.Authorize(context.Background(), a); err != nil {
		t.Error(err)
	}
	if s := created.Spec.ResourceAttributes.LabelSelector; s == nil || len(s.Requirements) != 0 ||
		s.RawSelector != "a in (b,c),gen>3" {
		t.Errorf("label selector %+v", s)
	}
	reviewStatus = authorizationv1.SubjectAccessReviewStatus{Denied: true}
	if d, _, _ := r.Authorize(context.Background(), authorizer.AttributesRecord{
		User: &user.DefaultInfo{Name: "bob"},
		Verb: "get",
		Path: "/x",
	}); d != authorizer.DecisionDeny || created.Spec.NonResourceAttributes.Path != "/x" {
		t.Errorf("%v, created %+v", d, created.Spec)
	}
	reviewStatus = authorizationv1.SubjectAccessReviewStatus{}
	if d, _, _ := r.Authorize(context.Background(), a); d != authorizer.DecisionNoOpinion {
		t.Errorf("without an opinion: %v", d)
	}
	reviewStatus.EvaluationError = "a webhook is away"
	if d, _, err := r.Authorize(context.Background(), a); d != authorizer.DecisionNoOpinion || err == nil ||
		err.Error() != "a webhook is away" {
		t.Errorf("an authorizer failed: %v, %v", d, err)
	}
	failure = errors.New("away")
	if d, _, err := r.Authorize(context.Background(), a); d != authorizer.DecisionDeny || err == nil {
		t.Errorf("the gateway is unreachable: %v, %v", d, err)
	}
}
