package verbs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/kubernetes/pkg/apis/authentication"
	"k8s.io/kubernetes/pkg/registry/authentication/tokenreview"

	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/warnings"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Gate is whom a write asks while it runs: the gateway, at the other end of the Write stream.
type Gate interface {
	// Lifecycle is NamespaceLifecycle over what this registry knows; nil where it does not know enough.
	Lifecycle() admission.MutationInterface
	// Review runs one admission phase. An error refuses the write.
	Review(ctx context.Context, phase registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error)
	Authorize(ctx context.Context, a *commonv1.Attributes) (*authzv1.AuthorizeResponse, error)
	ReviewToken(ctx context.Context, r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error)
	Rules(ctx context.Context, r *authzv1.RulesRequest) (*authzv1.RulesResponse, error)
}

type gateKey struct{}

// WithGate makes g the one that ctx's write asks.
func WithGate(ctx context.Context, g Gate) context.Context {
	return context.WithValue(ctx, gateKey{}, g)
}

func gateFrom(ctx context.Context) (Gate, error) {
	g, ok := ctx.Value(gateKey{}).(Gate)
	if !ok {
		return nil, errors.New("nobody to ask: the call did not come through a write stream")
	}
	return g, nil
}

// Authorizer asks the Gate of the write at hand. The storages take it for escalation and approval checks. It fails
// closed: without a Gate nothing is allowed.
type Authorizer struct{}

// Authorize implements authorizer.Authorizer.
func (Authorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	g, err := gateFrom(ctx)
	if err != nil {
		return authorizer.DecisionDeny, "", err
	}
	resp, err := g.Authorize(ctx, identity.AttributesProto(a))
	if err != nil {
		return authorizer.DecisionDeny, "", err
	}
	if resp.EvaluationError != "" {
		err = errors.New(resp.EvaluationError)
	}
	return identity.Decision(resp.Decision), resp.Reason, err
}

// TokenReviews is the TokenReview resource. Upstream's storage asks with a context of its own making, in which there is
// no Gate; all but that is upstream's.
type TokenReviews struct {
	*tokenreview.REST
	audiences authenticator.Audiences
}

// NewTokenReviews wraps upstream's storage. audiences are the API's own, which a review without any is for.
func NewTokenReviews(audiences []string) *TokenReviews {
	return &TokenReviews{tokenreview.NewREST(nil, nil), audiences}
}

// errAudiences is upstream's answer to an authenticator that does not know of audiences
// (k8s.io/kubernetes/pkg/registry/authentication/tokenreview, badAuthenticatorAuds).
var errAudiences = apierrors.NewInternalError(errors.New("error validating audiences"))

// Create implements rest.Creater.
func (t *TokenReviews) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	opts *metav1.CreateOptions) (runtime.Object, error) {
	out, err := t.REST.Create(ctx, obj, validate, opts) // without an authenticator it checks the review, and no more
	if err != nil {
		return nil, err
	}
	review := out.(*authentication.TokenReview)
	g, err := gateFrom(ctx)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	resp, err := g.ReviewToken(ctx, &authnv1.ReviewTokenRequest{
		Token:     review.Spec.Token,
		Audiences: review.Spec.Audiences,
	})
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	wanted := t.audiences
	if len(review.Spec.Audiences) > 0 {
		wanted = authenticator.Audiences(review.Spec.Audiences)
	}
	if len(wanted) > 0 && resp.Authenticated && len(wanted.Intersect(resp.Audiences)) == 0 {
		return nil, errAudiences
	}
	review.Status.Authenticated, review.Status.Error = resp.Authenticated, resp.Error
	if resp.Authenticated {
		u := identity.User(resp.User)
		review.Status.User = authentication.UserInfo{
			Username: u.Name,
			UID:      u.UID,
			Groups:   u.Groups,
			Extra:    map[string]authentication.ExtraValue{},
		}
		for k, v := range u.Extra {
			review.Status.User.Extra[k] = v
		}
		review.Status.Audiences = resp.Audiences
	}
	return review, nil
}

// RuleResolver asks the Gate what a user may do.
type RuleResolver struct{}

// RulesFor implements authorizer.RuleResolver.
func (RuleResolver) RulesFor(ctx context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo,
	[]authorizer.NonResourceRuleInfo, bool, error) {
	g, err := gateFrom(ctx)
	if err != nil {
		return nil, nil, true, err
	}
	resp, err := g.Rules(ctx, &authzv1.RulesRequest{User: identity.UserProto(u), Namespace: namespace})
	if err != nil {
		return nil, nil, true, err
	}
	var rr []authorizer.ResourceRuleInfo
	for _, r := range resp.ResourceRules {
		rr = append(rr, &authorizer.DefaultResourceRuleInfo{
			Verbs:         r.Verbs,
			APIGroups:     r.ApiGroups,
			Resources:     r.Resources,
			ResourceNames: r.ResourceNames,
		})
	}
	var nr []authorizer.NonResourceRuleInfo
	for _, r := range resp.NonResourceRules {
		nr = append(nr, &authorizer.DefaultNonResourceRuleInfo{Verbs: r.Verbs, NonResourceURLs: r.NonResourceUrls})
	}
	if resp.EvaluationError != "" {
		err = errors.New(resp.EvaluationError)
	}
	return rr, nr, resp.Incomplete, err
}

// gateAdmission is the admission chain as the storages see it: each review goes through the Gate. It asks only for the
// operations that somebody looks at, and runs what lifecycle holds itself where it can.
type gateAdmission struct {
	gate                       Gate
	endpoint                   *Endpoint
	admit, lifecycle, validate []admissionv1.Operation
	// atOnce are those of validate that are asked about with admit. validated says, once, whether what was admitted
	// last is valid: one that is then stored under another generated name is asked about.
	atOnce    []admissionv1.Operation
	validated *admissionv1.Verdict
}

var operations = map[admission.Operation]admissionv1.Operation{
	admission.Create:  admissionv1.Operation_OPERATION_CREATE,
	admission.Update:  admissionv1.Operation_OPERATION_UPDATE,
	admission.Delete:  admissionv1.Operation_OPERATION_DELETE,
	admission.Connect: admissionv1.Operation_OPERATION_CONNECT,
}

func (g *gateAdmission) Handles(op admission.Operation) bool {
	return slices.Contains(g.admit, operations[op]) || slices.Contains(g.validate, operations[op])
}

// Admit implements admission.MutationInterface: the attributes' object is changed in place.
func (g *gateAdmission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	op := operations[a.GetOperation()]
	if !slices.Contains(g.admit, op) {
		return nil
	}
	alone := slices.Contains(g.lifecycle, op)
	if alone || op == admissionv1.Operation_OPERATION_DELETE && a.GetResource() == namespaces {
		if own := g.gate.Lifecycle(); own != nil {
			// It is told of a namespace's deletion even where admission answers: it looks twice at that namespace then.
			if err := own.Admit(ctx, a, g.endpoint); alone {
				return err
			}
		}
	}
	verdict, err := g.ask(ctx, registryv1.Phase_PHASE_ADMIT, a)
	if err != nil || a.GetObject() == nil {
		return err
	}
	if slices.Contains(g.atOnce, op) {
		g.validated = verdict
	}
	if len(verdict.GetObject()) == 0 {
		return nil
	}
	return g.decodeInto(verdict.Object, a.GetObject())
}

// Validate implements admission.ValidationInterface.
func (g *gateAdmission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if !slices.Contains(g.validate, operations[a.GetOperation()]) {
		return nil
	}
	if slices.Contains(g.atOnce, operations[a.GetOperation()]) {
		seen := g.validated
		if g.validated = nil; seen.GetValidated() {
			audit.AddAuditAnnotationsMap(ctx, seen.ValidatedAnnotations)
			return nil
		}
	}
	_, err := g.ask(ctx, registryv1.Phase_PHASE_VALIDATE, a)
	return err
}

// noCreates is an admission chain that lets nothing new in.
type noCreates struct{ admission.Interface }

func (noCreates) refuse(a admission.Attributes) error {
	return apierrors.NewForbidden(a.GetResource().GroupResource(), a.GetName(),
		errors.New("create not allowed while custom resource definition is terminating"))
}

// Handles implements admission.Interface.
func (n noCreates) Handles(op admission.Operation) bool {
	return op == admission.Create || n.Interface.Handles(op)
}

// Admit implements admission.MutationInterface.
func (n noCreates) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if a.GetOperation() == admission.Create {
		return n.refuse(a)
	}
	if m, ok := n.Interface.(admission.MutationInterface); ok {
		return m.Admit(ctx, a, o)
	}
	return nil
}

// Validate implements admission.ValidationInterface.
func (n noCreates) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if a.GetOperation() == admission.Create {
		return n.refuse(a)
	}
	if v, ok := n.Interface.(admission.ValidationInterface); ok {
		return v.Validate(ctx, a, o)
	}
	return nil
}

func (g *gateAdmission) ask(ctx context.Context, phase registryv1.Phase,
	a admission.Attributes) (*admissionv1.Verdict, error) {
	r := &admissionv1.Review{
		Operation: operations[a.GetOperation()],
		Kind:      &commonv1.Kind{Group: a.GetKind().Group, Version: a.GetKind().Version, Kind: a.GetKind().Kind},
		Resource: &commonv1.Resource{
			Group:       a.GetResource().Group,
			Version:     a.GetResource().Version,
			Resource:    a.GetResource().Resource,
			Subresource: a.GetSubresource(),
		},
		Namespace: a.GetNamespace(),
		Name:      a.GetName(),
		User:      identity.UserProto(a.GetUserInfo()),
		DryRun:    a.IsDryRun(),
		MediaType: g.mediaType(a),
		Validate:  phase == registryv1.Phase_PHASE_ADMIT && slices.Contains(g.atOnce, operations[a.GetOperation()]),
	}
	for _, other := range g.endpoint.Equivalents.EquivalentResourcesFor(a.GetResource(), a.GetSubresource()) {
		if other == a.GetResource() {
			continue
		}
		k := g.endpoint.Equivalents.KindFor(other, a.GetSubresource())
		r.Equivalents = append(r.Equivalents, &admissionv1.Equivalent{
			Resource: &commonv1.Resource{
				Group:       other.Group,
				Version:     other.Version,
				Resource:    other.Resource,
				Subresource: a.GetSubresource(),
			},
			Kind: &commonv1.Kind{Group: k.Group, Version: k.Version, Kind: k.Kind},
		})
	}
	var err error
	if r.Object, err = g.encode(a.GetObject(), r.MediaType); err != nil {
		return nil, err
	}
	if r.OldObject, err = g.encode(a.GetOldObject(), r.MediaType); err != nil {
		return nil, err
	}
	if opts := a.GetOperationOptions(); opts != nil {
		if r.Options, err = json.Marshal(opts); err != nil {
			return nil, err
		}
	}
	verdict, err := g.gate.Review(ctx, phase, r)
	if err != nil {
		warnings.Forward(ctx, rpc.Warnings(err))
		return nil, err
	}
	warnings.Forward(ctx, verdict.GetWarnings())
	return verdict, nil
}

func (g *gateAdmission) mediaType(a admission.Attributes) string {
	for _, o := range []runtime.Object{a.GetObject(), a.GetOldObject()} {
		if _, ok := o.(runtime.Unstructured); ok {
			return runtime.ContentTypeJSON
		}
	}
	return runtime.ContentTypeProtobuf
}

func (g *gateAdmission) encode(obj runtime.Object, mediaType string) ([]byte, error) {
	if obj == nil || reflect.ValueOf(obj).IsNil() {
		return nil, nil
	}
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return u.MarshalJSON()
	}
	info, ok := runtime.SerializerInfoForMediaType(g.endpoint.Serializer.SupportedMediaTypes(), mediaType)
	if !ok {
		return nil, fmt.Errorf("no serializer for %s", mediaType)
	}
	return runtime.Encode(g.endpoint.Serializer.EncoderForVersion(info.Serializer, g.endpoint.Kind.GroupVersion()), obj)
}

func (g *gateAdmission) decodeInto(data []byte, obj runtime.Object) error {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return u.UnmarshalJSON(data)
	}
	info, _ := runtime.SerializerInfoForMediaType(g.endpoint.Serializer.SupportedMediaTypes(),
		runtime.ContentTypeProtobuf)
	decoded, _, err := g.endpoint.Serializer.DecoderToVersion(info.Serializer,
		g.endpoint.Hub()).Decode(data, &g.endpoint.Kind, nil)
	if err != nil {
		return apierrors.NewInternalError(fmt.Errorf("decode the admitted object: %w", err))
	}
	dst, src := reflect.ValueOf(obj), reflect.ValueOf(decoded)
	if dst.Type() != src.Type() {
		return apierrors.NewInternalError(fmt.Errorf("admission turned a %T into a %T", obj, decoded))
	}
	dst.Elem().Set(src.Elem())
	return nil
}
