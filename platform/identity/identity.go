// Package identity converts users, attributes and decisions between the contracts and k8s.io/apiserver's types. It
// does not authenticate or authorize. It has no goroutines.
package identity

import (
	"errors"
	"fmt"
	"net/netip"
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

// The services that read the cluster are users of it, in a group of their own. services/authz defines their
// permissions, which do not depend on the cluster's policy. A client has these permissions too if it may impersonate
// the group. Without --services-client-ca-file, it also has them if another authenticator gives it such a name.
const (
	ServicesGroup = "system:watershed"
	// ServicePrefix is followed by the name of the service.
	ServicePrefix = "system:watershed:"
	Authn         = ServicePrefix + "authn"
	Authz         = ServicePrefix + "authz"
	Admission     = ServicePrefix + "admission"
	// Registry only calls conversion webhooks through the gateway.
	Registry = ServicePrefix + "registry"
	// GatewayUser is the user of a gateway that calls its own API, in its process. No certificate has this name.
	GatewayUser = ServicePrefix + "gateway"
)

// Gateway is the gateway's name on the inner network: the server name in the TLS connections of authn, authz and
// admission.
const Gateway = "gateway"

// PolicyRevisionLease is how long a message of Authz.PolicyRevisions is valid. A gateway without a message for that
// time caches no decision, because its authz replica may be frozen.
const PolicyRevisionLease = 3 * time.Second

// IsAnonymous reports if a user is nil, or anonymous by name or group.
func IsAnonymous(u user.Info) bool {
	return u == nil || isAnonymous(u)
}

func isAnonymous(u subject) bool {
	return u.GetName() == user.Anonymous || slices.Contains(u.GetGroups(), user.AllUnauthenticated)
}

// Owner returns the owner whose quota a user's resources count against. It is the user or, for a service account, its
// namespace, because a namespace may have any number of service accounts.
func Owner(user string) string {
	if rest, ok := strings.CutPrefix(user, "system:serviceaccount:"); ok {
		namespace, _, _ := strings.Cut(rest, ":")
		return "system:serviceaccount:" + namespace
	}
	return user
}

// QuotaOwner returns the owner whose quota a request's lasting resources at a gateway count against: connections,
// streams, and the delivery of watches. It is the Owner of the user. For an anonymous user it is the Host of the
// address, so that a host cannot exclude other hosts.
//
// It returns "", no quota, for users that the cluster itself depends on. These are the system's services, nodes, and
// service accounts of kube-system, some of which run on every node. Members of system:masters have no quota either.
func QuotaOwner(u subject, address string) string {
	if IsPriority(u) || slices.Contains(u.GetGroups(), systemAccounts) {
		return ""
	}
	if isAnonymous(u) {
		return u.GetName() + " at " + Host(address)
	}
	return Owner(u.GetName())
}

// IsPriority reports whether a user is of the system's services, of the nodes, or of system:masters.
func IsPriority(u interface{ GetGroups() []string }) bool {
	return slices.ContainsFunc(u.GetGroups(), func(g string) bool {
		return g == ServicesGroup || g == user.NodesGroup || g == user.SystemPrivilegedGroup
	})
}

// IsReserved reports whether a user has the name or the group of the system's services.
func IsReserved(u user.Info) bool {
	return strings.HasPrefix(u.GetName(), ServicePrefix) || slices.Contains(u.GetGroups(), ServicesGroup)
}

// Host returns the host of a client's address, host:port. For an IPv6 address it is the /64 network, whose addresses a
// single machine may have.
func Host(address string) string {
	a, err := netip.ParseAddrPort(address)
	if err != nil {
		return address
	}
	ip := a.Addr().Unmap()
	if ip.Is6() {
		return netip.PrefixFrom(ip.WithZone(""), 64).Masked().String()
	}
	return ip.String()
}

// subject is a user of apiserver or of the contracts.
type subject interface {
	GetName() string
	GetGroups() []string
}

// systemAccounts is the group of kube-system's service accounts.
var systemAccounts = serviceaccount.MakeNamespaceGroupName(metav1.NamespaceSystem)

// UserProto encodes u for the wire; nil stays nil.
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

// User decodes a user that UserProto has encoded.
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

// AttributesProto encodes a for the wire. If a part of a selector was parsed, it keeps this part and the error,
// because some authorizers check the part and others the error.
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
			if strings.ContainsAny(r.Field, `,=!\`) { // of a SubjectAccessReview; as text it would be another field
				err = fmt.Errorf("%q is not a field", r.Field)
				continue
			}
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

// Attributes decodes attributes that AttributesProto has encoded.
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

// Decision decodes a decision. A value that it does not have is NoOpinion.
func Decision(d authzv1.Decision) authorizer.Decision {
	switch d {
	case authzv1.Decision_DECISION_ALLOW:
		return authorizer.DecisionAllow
	case authzv1.Decision_DECISION_DENY:
		return authorizer.DecisionDeny
	}
	return authorizer.DecisionNoOpinion
}

// DecisionProto encodes a decision for the wire.
func DecisionProto(d authorizer.Decision) authzv1.Decision {
	switch d {
	case authorizer.DecisionAllow:
		return authzv1.Decision_DECISION_ALLOW
	case authorizer.DecisionDeny:
		return authzv1.Decision_DECISION_DENY
	}
	return authzv1.Decision_DECISION_UNSPECIFIED
}
