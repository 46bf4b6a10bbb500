package handlers

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

	"watershed.dev/platform/crd"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/warnings"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	authnv1 "watershed.dev/proto/watershed/authn/v1"
	authzv1 "watershed.dev/proto/watershed/authz/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// Callbacks is the set of calls that a running write makes to the gateway, at the other end of the Write stream.
type Callbacks interface {
	// Lifecycle returns the registry's own NamespaceLifecycle plugin. It returns nil if the registry's namespaces are
	// not synced or not fresh.
	Lifecycle() admission.MutationInterface
	// Review runs an admission phase. An error rejects the write.
	Review(ctx context.Context, phase registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error)
	Authorize(ctx context.Context, a *commonv1.Attributes) (*authzv1.AuthorizeResponse, error)
	ReviewToken(ctx context.Context, r *authnv1.ReviewTokenRequest) (*authnv1.AuthenticateResponse, error)
	Rules(ctx context.Context, r *authzv1.RulesRequest) (*authzv1.RulesResponse, error)
}

type callbacksKey struct{}

// WithCallbacks returns ctx with callbacks. Authorizer, RuleResolver and TokenReviews read them from it.
func WithCallbacks(ctx context.Context, callbacks Callbacks) context.Context {
	return context.WithValue(ctx, callbacksKey{}, callbacks)
}

func callbacksFrom(ctx context.Context) (Callbacks, error) {
	callbacks, ok := ctx.Value(callbacksKey{}).(Callbacks)
	if !ok {
		return nil, errors.New("no callbacks: the call did not come through a Write stream")
	}
	return callbacks, nil
}

// Authorizer authorizes through the Callbacks of the current write. Upstream's storages use it for escalation and
// approval checks. Without a decision, it returns NoOpinion and the error: these checks then reject the write, and a
// SubjectAccessReview has the error.
type Authorizer struct{}

// Authorize implements authorizer.Authorizer.
func (Authorizer) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	callbacks, err := callbacksFrom(ctx)
	if err != nil {
		return authorizer.DecisionNoOpinion, "", err
	}
	resp, err := callbacks.Authorize(ctx, identity.AttributesProto(a))
	if err != nil {
		return authorizer.DecisionNoOpinion, "", err
	}
	if resp.EvaluationError != "" {
		err = errors.New(resp.EvaluationError)
	}
	return identity.Decision(resp.Decision), resp.Reason, err
}

// TokenReviews serves the TokenReview resource. It wraps upstream's storage, which would authenticate with a new
// context that lacks Callbacks. TokenReviews makes that call itself.
type TokenReviews struct {
	*tokenreview.REST
	audiences authenticator.Audiences
}

// NewTokenReviews wraps upstream's storage. audiences are the API's own: a review without audiences is for them.
func NewTokenReviews(audiences []string) *TokenReviews {
	return &TokenReviews{tokenreview.NewREST(nil, nil), audiences}
}

// errAudiences is upstream's error for an authenticator that ignores audiences
// (k8s.io/kubernetes/pkg/registry/authentication/tokenreview, badAuthenticatorAuds).
var errAudiences = apierrors.NewInternalError(errors.New("error validating audiences"))

// Create implements rest.Creater.
func (t *TokenReviews) Create(ctx context.Context, obj runtime.Object, validate rest.ValidateObjectFunc,
	opts *metav1.CreateOptions) (runtime.Object, error) {
	out, err := t.REST.Create(ctx, obj, validate, opts) // without an authenticator it only validates the review
	if err != nil {
		return nil, err
	}
	review := out.(*authentication.TokenReview)
	callbacks, err := callbacksFrom(ctx)
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	resp, err := callbacks.ReviewToken(ctx, &authnv1.ReviewTokenRequest{
		Token:     review.Spec.Token,
		Audiences: review.Spec.Audiences,
	})
	if err != nil {
		return nil, apierrors.NewInternalError(err)
	}
	audiences := t.audiences
	if len(review.Spec.Audiences) > 0 {
		audiences = authenticator.Audiences(review.Spec.Audiences)
	}
	if len(audiences) > 0 && resp.Authenticated && len(audiences.Intersect(resp.Audiences)) == 0 {
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

// RuleResolver resolves a user's rules through the Callbacks of the current write.
type RuleResolver struct{}

// RulesFor implements authorizer.RuleResolver.
func (RuleResolver) RulesFor(ctx context.Context, u user.Info, namespace string) ([]authorizer.ResourceRuleInfo,
	[]authorizer.NonResourceRuleInfo, bool, error) {
	callbacks, err := callbacksFrom(ctx)
	if err != nil {
		return nil, nil, true, err
	}
	resp, err := callbacks.Rules(ctx, &authzv1.RulesRequest{User: identity.UserProto(u), Namespace: namespace})
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

// remoteAdmission is the admission chain that the storages run. It sends reviews to the gateway through Callbacks, but
// only for the operations in admit and validate. lifecycle lists the operations that only NamespaceLifecycle reviews.
// remoteAdmission runs that plugin in the registry if Callbacks has it.
type remoteAdmission struct {
	callbacks                  Callbacks
	scope                      *RequestScope
	admit, lifecycle, validate []admissionv1.Operation
	// validateInAdmit is the part of validate that the gateway validates in the review of Admit. validated is the
	// verdict of the last Admit, and Validate uses it once. An object that is stored again under another generated name
	// is reviewed again.
	validateInAdmit []admissionv1.Operation
	validated       *admissionv1.Verdict
}

var operations = map[admission.Operation]admissionv1.Operation{
	admission.Create:  admissionv1.Operation_OPERATION_CREATE,
	admission.Update:  admissionv1.Operation_OPERATION_UPDATE,
	admission.Delete:  admissionv1.Operation_OPERATION_DELETE,
	admission.Connect: admissionv1.Operation_OPERATION_CONNECT,
}

func (ra *remoteAdmission) Handles(op admission.Operation) bool {
	return slices.Contains(ra.admit, operations[op]) || slices.Contains(ra.validate, operations[op])
}

// Admit implements admission.MutationInterface. It changes the attributes' object in place.
func (ra *remoteAdmission) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	op := operations[a.GetOperation()]
	if !slices.Contains(ra.admit, op) {
		return nil
	}
	lifecycleOnly := slices.Contains(ra.lifecycle, op)
	if lifecycleOnly || op == admissionv1.Operation_OPERATION_DELETE && a.GetResource() == namespaces {
		if lifecycle := ra.callbacks.Lifecycle(); lifecycle != nil {
			// NamespaceLifecycle must see each namespace's deletion, even if the gateway reviews it. It then uses live
			// lookups of that namespace for a while.
			if err := lifecycle.Admit(ctx, a, ra.scope); lifecycleOnly {
				return err
			}
		}
	}
	verdict, err := ra.review(ctx, registryv1.Phase_PHASE_ADMIT, a)
	if err != nil || a.GetObject() == nil {
		return err
	}
	if slices.Contains(ra.validateInAdmit, op) {
		ra.validated = verdict
	}
	if len(verdict.GetObject()) == 0 {
		return nil
	}
	return ra.decodeInto(verdict.Object, a.GetObject())
}

// Validate implements admission.ValidationInterface.
func (ra *remoteAdmission) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if !slices.Contains(ra.validate, operations[a.GetOperation()]) {
		return nil
	}
	if slices.Contains(ra.validateInAdmit, operations[a.GetOperation()]) {
		verdict := ra.validated
		if ra.validated = nil; verdict.GetValidated() {
			audit.AddAuditAnnotationsMap(ctx, verdict.ValidatedAnnotations)
			return nil
		}
	}
	_, err := ra.review(ctx, registryv1.Phase_PHASE_VALIDATE, a)
	return err
}

// terminatingAdmission is an admission chain that forbids creates.
type terminatingAdmission struct{ admission.Interface }

func (terminatingAdmission) forbidden(a admission.Attributes) error {
	return apierrors.NewForbidden(a.GetResource().GroupResource(), a.GetName(),
		errors.New("create not allowed while custom resource definition is terminating"))
}

// Handles implements admission.Interface.
func (n terminatingAdmission) Handles(op admission.Operation) bool {
	return op == admission.Create || n.Interface.Handles(op)
}

// Admit implements admission.MutationInterface.
func (n terminatingAdmission) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if a.GetOperation() == admission.Create {
		return n.forbidden(a)
	}
	if m, ok := n.Interface.(admission.MutationInterface); ok {
		return m.Admit(ctx, a, o)
	}
	return nil
}

// Validate implements admission.ValidationInterface.
func (n terminatingAdmission) Validate(
	ctx context.Context,
	a admission.Attributes,
	o admission.ObjectInterfaces,
) error {
	if a.GetOperation() == admission.Create {
		return n.forbidden(a)
	}
	if v, ok := n.Interface.(admission.ValidationInterface); ok {
		return v.Validate(ctx, a, o)
	}
	return nil
}

func (ra *remoteAdmission) review(ctx context.Context, phase registryv1.Phase,
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
		MediaType: ra.mediaType(a),
		Validate: phase == registryv1.Phase_PHASE_ADMIT &&
			slices.Contains(ra.validateInAdmit, operations[a.GetOperation()]),
	}
	mapper := ra.scope.EquivalentResourceMapper
	for _, equivalent := range mapper.EquivalentResourcesFor(a.GetResource(), a.GetSubresource()) {
		if equivalent == a.GetResource() {
			continue
		}
		k := ra.scope.EquivalentResourceMapper.KindFor(equivalent, a.GetSubresource())
		r.Equivalents = append(r.Equivalents, &admissionv1.Equivalent{
			Resource: &commonv1.Resource{
				Group:       equivalent.Group,
				Version:     equivalent.Version,
				Resource:    equivalent.Resource,
				Subresource: a.GetSubresource(),
			},
			Kind: &commonv1.Kind{Group: k.Group, Version: k.Version, Kind: k.Kind},
		})
	}
	var err error
	if r.Object, err = ra.encode(a.GetObject(), r.MediaType); err != nil {
		return nil, err
	}
	if r.OldObject, err = ra.encode(a.GetOldObject(), r.MediaType); err != nil {
		return nil, err
	}
	if opts := a.GetOperationOptions(); opts != nil {
		if r.Options, err = json.Marshal(opts); err != nil {
			return nil, err
		}
	}
	verdict, err := ra.callbacks.Review(ctx, phase, r)
	if err != nil {
		warnings.Forward(ctx, rpc.Warnings(err))
		return nil, err
	}
	warnings.Forward(ctx, verdict.GetWarnings())
	return verdict, nil
}

func (ra *remoteAdmission) mediaType(a admission.Attributes) string {
	for _, o := range []runtime.Object{a.GetObject(), a.GetOldObject()} {
		if _, ok := o.(runtime.Unstructured); ok {
			return runtime.ContentTypeJSON
		}
	}
	return runtime.ContentTypeProtobuf
}

func (ra *remoteAdmission) encode(obj runtime.Object, mediaType string) ([]byte, error) {
	if obj == nil || reflect.ValueOf(obj).IsNil() {
		return nil, nil
	}
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return crd.MarshalJSON(u)
	}
	info, ok := runtime.SerializerInfoForMediaType(ra.scope.Serializer.SupportedMediaTypes(), mediaType)
	if !ok {
		return nil, fmt.Errorf("no serializer for %s", mediaType)
	}
	return runtime.Encode(ra.scope.Serializer.EncoderForVersion(info.Serializer, ra.scope.Kind.GroupVersion()), obj)
}

func (ra *remoteAdmission) decodeInto(data []byte, obj runtime.Object) error {
	if u, ok := obj.(*unstructured.Unstructured); ok {
		return u.UnmarshalJSON(data)
	}
	info, _ := runtime.SerializerInfoForMediaType(ra.scope.Serializer.SupportedMediaTypes(),
		runtime.ContentTypeProtobuf)
	decoded, _, err := ra.scope.Serializer.DecoderToVersion(info.Serializer,
		ra.scope.HubGroupVersion()).Decode(data, &ra.scope.Kind, nil)
	if err != nil {
		return apierrors.NewInternalError(fmt.Errorf("decode the admitted object: %w", err))
	}
	dst, src := reflect.ValueOf(obj), reflect.ValueOf(decoded)
	if dst.Type() != src.Type() {
		return apierrors.NewInternalError(fmt.Errorf("admission changed a %T to a %T", obj, decoded))
	}
	dst.Elem().Set(src.Elem())
	return nil
}
