package identity

import (
	"testing"

	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// A user is the same on both sides of the wire.
func TestUsersCrossTheWire(t *testing.T) {
	u := &user.DefaultInfo{
		Name:   "jane",
		UID:    "1",
		Groups: []string{"a", "b"},
		Extra:  map[string][]string{"scopes": {"x", "y"}, "empty": nil},
	}
	got := User(UserProto(u))
	if !equality.Semantic.DeepEqual(got, u) {
		t.Errorf("%+v, not %+v", got, u)
	}
	if UserProto(nil) != nil {
		t.Error("nil has become a user")
	}
}

// Attributes are the same on both sides of the wire. A selector that does not parse is omitted.
func TestAttributesCrossTheWire(t *testing.T) {
	p := &commonv1.Attributes{
		User:            &commonv1.User{Name: "jane"},
		Verb:            "list",
		ResourceRequest: true,
		Path:            "/api/v1/namespaces/x/pods",
		Resource:        &commonv1.Resource{Version: "v1", Resource: "pods", Subresource: "status"},
		Namespace:       "x",
		Name:            "p",
		LabelSelector:   "a in (b,c),!d",
		FieldSelector:   `metadata.name!=q,spec.nodeName=n\,1`,
	}
	if got := AttributesProto(Attributes(p)); !proto.Equal(got, p) {
		t.Errorf("%v, not %v", got, p)
	}
	odd := Attributes(&commonv1.Attributes{LabelSelector: "===", FieldSelector: "a,,b"})
	if odd.LabelSelectorParsingErr == nil || odd.FieldSelectorParsingErr == nil {
		t.Errorf("odd selectors parse: %+v", odd)
	}
	if back := AttributesProto(odd); back.LabelSelector != "" || back.FieldSelector != "" {
		t.Errorf("odd selectors are sent on: %v", back)
	}
}

// A field of a SubjectAccessReview may have any text. It must not become another field.
func TestAFieldStaysAField(t *testing.T) {
	for _, field := range []string{"a=b,spec.nodeName", "spec.nodeName!", `\\`} {
		p := AttributesProto(authorizer.AttributesRecord{FieldSelectorRequirements: fields.Requirements{
			{Field: field, Operator: selection.Equals, Value: "n1"},
			{Field: "metadata.name", Operator: selection.Equals, Value: "x"},
		}})
		if got := Attributes(p); len(got.FieldSelectorRequirements) != 1 || got.FieldSelectorParsingErr == nil ||
			got.FieldSelectorRequirements[0].Field != "metadata.name" {
			t.Errorf("%s: %+v", field, got)
		}
	}
}

func TestDecisionsCrossTheWire(t *testing.T) {
	for _, d := range []authorizer.Decision{
		authorizer.DecisionAllow,
		authorizer.DecisionDeny,
		authorizer.DecisionNoOpinion,
	} {
		if got := Decision(DecisionProto(d)); got != d {
			t.Errorf("%v becomes %v", d, got)
		}
	}
	if Decision(99) != authorizer.DecisionNoOpinion {
		t.Error("an unknown decision is not NoOpinion")
	}
}

// A service account's resources count against its namespace, which may have any number of service accounts.
func TestOwners(t *testing.T) {
	for of, want := range map[string]string{
		"jane":                          "jane",
		"system:serviceaccount:x:a":     "system:serviceaccount:x",
		"system:serviceaccount:x:a:b":   "system:serviceaccount:x",
		"system:serviceaccount":         "system:serviceaccount",
		"system:serviceaccounts:x:jane": "system:serviceaccounts:x:jane",
	} {
		if got := Owner(of); got != want {
			t.Errorf("%q is %q's, not %q's", of, got, want)
		}
	}
}

func TestIsAnonymous(t *testing.T) {
	for _, c := range []struct {
		u    user.Info
		want bool
	}{
		{nil, true},
		{&user.DefaultInfo{Name: user.Anonymous}, true},
		{&user.DefaultInfo{Name: "jane", Groups: []string{user.AllUnauthenticated}}, true},
		{&user.DefaultInfo{Name: "jane", Groups: []string{user.AllAuthenticated}}, false},
	} {
		if got := IsAnonymous(c.u); got != c.want {
			t.Errorf("%v: %v", c.u, got)
		}
	}
}

func TestQuotaOwner(t *testing.T) {
	for want, u := range map[string]*user.DefaultInfo{
		"alice": {Name: "alice", Groups: []string{"system:authenticated"}},
		"system:serviceaccount:shop": {Name: "system:serviceaccount:shop:robot",
			Groups: []string{"system:serviceaccounts"}},
		"system:anonymous at 10.0.0.1": {Name: "system:anonymous", Groups: []string{"system:unauthenticated"}},
	} {
		if got := QuotaOwner(u, "10.0.0.1:1234"); got != want {
			t.Errorf("%s: %q, want %q", u.Name, got, want)
		}
	}
	for _, group := range []string{"system:masters", "system:nodes", "system:watershed",
		"system:serviceaccounts:kube-system"} {
		if got := QuotaOwner(&user.DefaultInfo{Name: "x", Groups: []string{"y", group}}, "10.0.0.1:1234"); got != "" {
			t.Errorf("%s: %q", group, got)
		}
	}
}

func TestHost(t *testing.T) {
	for address, want := range map[string]string{
		"10.0.0.1:443":               "10.0.0.1",
		"[::ffff:10.0.0.1]:443":      "10.0.0.1",
		"[2001:db8:1:2:3:4:5:6]:443": "2001:db8:1:2::/64",
		"[fe80::1%eth0]:443":         "fe80::/64",
		"@":                          "@",
	} {
		if got := Host(address); got != want {
			t.Errorf("%s: %s, want %s", address, got, want)
		}
	}
}
