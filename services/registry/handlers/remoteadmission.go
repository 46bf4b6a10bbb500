package handlers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/audit"

	"watershed.dev/platform/crd"
	"watershed.dev/platform/identity"
	"watershed.dev/platform/rpc"
	"watershed.dev/platform/warnings"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

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

func (ra *remoteAdmission) review(ctx context.Context, phase registryv1.Phase,
	a admission.Attributes) (*admissionv1.Verdict, error) {
	mediaType := ra.mediaType(a)
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
		MediaType: mediaType,
		Custom:    mediaType == runtime.ContentTypeJSON, // only custom resources are unstructured
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
