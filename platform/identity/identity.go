// Package identity translates who asks, and for what, between the contracts and k8s.io/apiserver's types.
package identity

import (
	"errors"
	"net"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/authentication/serviceaccount"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// The services that read the cluster are users of it, in a group of their own. What they may do is told in
// services/authz, and holds whatever the cluster's policy says. Whoever the client CA signs these names for, or who may
// impersonate the group, is one of them.
const (
	ServicesGroup = "system:watershed"
	Authn         = "system:watershed:authn"
	Authz         = "system:watershed:authz"
	Admission     = "system:watershed:admission"
	// GatewayUser is a gateway to its own API, within its process: nobody has a certificate of that name.
	GatewayUser = "system:watershed:gateway"
)

// Gateway is the gateway's name on the inner network, by which authn, authz and admission ask for it.
const Gateway = "gateway"

// PolicyRevisionLease is for how long a message of Authz.PolicyRevisions is good: a gateway that has heard nothing for so long
// keeps no decision, since the replica that it listens to may be frozen.
const PolicyRevisionLease = 3 * time.Second

// IsAnonymous says whether a user is nobody in particular: anonymous, by name or by group.
func IsAnonymous(u user.Info) bool {
	return u == nil || isAnonymous(u)
}

func isAnonymous(u subject) bool {
	return u.GetName() == user.Anonymous || slices.Contains(u.GetGroups(), user.AllUnauthenticated)
}

// Owner is whose share a user's use of something bounded counts against: the user's own or, for service accounts, their
// namespace's, which may hold any number of them.
func Owner(user string) string {
	if rest, ok := strings.CutPrefix(user, "system:serviceaccount:"); ok {
		namespace, _, _ := strings.Cut(rest, ":")
		return "system:serviceaccount:" + namespace
	}
	return user
}

// QuotaOwner is whose share of what lasts at a gateway (connections, streams, what watches are delivered) a request from an
// address counts against: that of its user's Owner or, of strangers, of the address' host, so that one of them does not
// keep the others out. "" is nobody's: what the cluster itself lives by has no bounds, which are the system's services,
// nodes, and the service accounts of kube-system, some of which are on every node; nor has who may do everything.
func QuotaOwner(u subject, address string) string {
	for _, g := range u.GetGroups() {
		if g == ServicesGroup || g == user.NodesGroup || g == user.SystemPrivilegedGroup || g == systemAccounts {
			return ""
		}
	}
	if isAnonymous(u) {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			host = address
		}
		return u.GetName() + " at " + host
	}
	return Owner(u.GetName())
}

// subject is a user as apiserver or the contracts have it.
type subject interface {
	GetName() string
	GetGroups() []string
}

// systemAccounts is the group of kube-system's service accounts.
var systemAccounts = serviceaccount.MakeNamespaceGroupName(metav1.NamespaceSystem)

// UserProto makes u fit for the wire; nil stays nil.
func UserProto(u user.Info) *commonv1.User {
	if u == nil {
		return nil
	}
	p := &commonv1.User{Name: u.GetName(), Uid: u.GetUID(), Groups: u.GetGroups()}
	for k, v := range u.GetExtra() {
		if p.Extra == nil {
			p.Extra = map[string]*commonv1.Values{}
		}
		p.Extra[k] = &commonv1.Values{Values: v}
	}
	return p
}

// User is UserProto's inverse.
func User(p *commonv1.User) *user.DefaultInfo {
	u := &user.DefaultInfo{Name: p.GetName(), UID: p.GetUid(), Groups: p.GetGroups()}
	for k, v := range p.GetExtra() {
		if u.Extra == nil {
			u.Extra = map[string][]string{}
		}
		u.Extra[k] = v.GetValues()
	}
	return u
}

// AttributesProto makes a fit for the wire. Of selectors that did not parse it keeps what did, and the error: some
// authorizers look at the one, some at the other.
func AttributesProto(a authorizer.Attributes) *commonv1.Attributes {
	p := &commonv1.Attributes{
		User:            UserProto(a.GetUser()),
		Verb:            a.GetVerb(),
		ResourceRequest: a.IsResourceRequest(),
		Path:            a.GetPath(),
		Namespace:       a.GetNamespace(),
		Name:            a.GetName(),
		Resource: &commonv1.Resource{
			Group:       a.GetAPIGroup(),
			Version:     a.GetAPIVersion(),
			Resource:    a.GetResource(),
			Subresource: a.GetSubresource(),
		},
	}
	if reqs, err := a.GetFieldSelector(); err != nil || len(reqs) > 0 {
		var parts []string
		for _, r := range reqs {
			parts = append(parts, r.Field+string(r.Operator)+fields.EscapeValue(r.Value))
		}
		p.FieldSelector, p.FieldSelectorError = strings.Join(parts, ","), textOf(err)
	}
	if reqs, err := a.GetLabelSelector(); err != nil || len(reqs) > 0 {
		p.LabelSelector, p.LabelSelectorError = labels.NewSelector().Add(reqs...).String(), textOf(err)
	}
	return p
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func errorOf(text string) error {
	if text == "" {
		return nil
	}
	return errors.New(text)
}

// Attributes is AttributesProto's inverse.
func Attributes(p *commonv1.Attributes) authorizer.AttributesRecord {
	r := authorizer.AttributesRecord{
		User:            User(p.GetUser()),
		Verb:            p.GetVerb(),
		ResourceRequest: p.GetResourceRequest(),
		Path:            p.GetPath(),
		Namespace:       p.GetNamespace(),
		Name:            p.GetName(),
		APIGroup:        p.GetResource().GetGroup(),
		APIVersion:      p.GetResource().GetVersion(),
		Resource:        p.GetResource().GetResource(),
		Subresource:     p.GetResource().GetSubresource(),
	}
	r.FieldSelectorParsingErr = errorOf(p.GetFieldSelectorError())
	r.LabelSelectorParsingErr = errorOf(p.GetLabelSelectorError())
	if p.GetFieldSelector() != "" {
		s, err := fields.ParseSelector(p.FieldSelector)
		if err == nil {
			r.FieldSelectorRequirements = s.Requirements()
		} else {
			r.FieldSelectorParsingErr = err
		}
	}
	if p.GetLabelSelector() != "" {
		s, err := labels.Parse(p.LabelSelector)
		if err == nil {
			r.LabelSelectorRequirements, _ = s.Requirements()
		} else {
			r.LabelSelectorParsingErr = err
		}
	}
	return r
}

// Decision translates an answer.
func Decision(d authzv1.Decision) authorizer.Decision {
	switch d {
	case authzv1.Decision_DECISION_ALLOW:
		return authorizer.DecisionAllow
	case authzv1.Decision_DECISION_DENY:
		return authorizer.DecisionDeny
	}
	return authorizer.DecisionNoOpinion
}

// DecisionProto is Decision's inverse.
func DecisionProto(d authorizer.Decision) authzv1.Decision {
	switch d {
	case authorizer.DecisionAllow:
		return authzv1.Decision_DECISION_ALLOW
	case authorizer.DecisionDeny:
		return authzv1.Decision_DECISION_DENY
	}
	return authzv1.Decision_DECISION_UNSPECIFIED
}
