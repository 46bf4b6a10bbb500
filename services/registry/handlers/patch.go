package handlers

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	cbor "k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/mergepatch"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apimachinery/pkg/util/yaml" // decodes whole numbers as int64, which structured merges compare
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	kjson "sigs.k8s.io/json"

	_ "watershed.dev/platform/patchlimit" // limits the copy operations of JSON patches
	registryv1 "watershed.dev/proto/watershed/registry/v1"
)

// maxJSONPatchOperations bounds the operations of a JSON patch, as in kube-apiserver.
const maxJSONPatchOperations = 10000

// patchTypes returns the media types of patches that the scope supports.
func (scope *RequestScope) patchTypes() []string {
	supported := []string{string(types.JSONPatchType), string(types.MergePatchType)}
	if !scope.APIResource.GetUnstructured() { // a strategic merge needs Go types
		supported = append(supported, string(types.StrategicMergePatchType))
	}
	supported = append(supported, string(types.ApplyYAMLPatchType))
	if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
		supported = append(supported, string(types.ApplyCBORPatchType))
	}
	return supported
}

// patcher applies a patch. After each conflict the storage calls it again, with the newer object.
type patcher struct {
	*writeOperation
	opts      *metav1.PatchOptions
	patchType types.PatchType
	directive string
	codec     runtime.Codec
	updater   rest.Patcher
}

func (w *writeOperation) patch(ctx context.Context) (*registryv1.ObjectResponse, error) {
	updater, ok := w.Storage.(rest.Patcher)
	if !ok {
		return nil, w.methodNotSupported("patch")
	}
	contentType, _, _ := strings.Cut(w.req.ContentType, ";")
	if !slices.Contains(w.patchTypes(), contentType) {
		return nil, negotiation.NewUnsupportedMediaTypeError(w.patchTypes())
	}
	if w.req.Name == "" {
		return nil, errEmptyName
	}
	ctx = request.WithNamespace(ctx, w.req.Namespace)
	p := &patcher{
		writeOperation: w,
		opts:           &metav1.PatchOptions{},
		patchType:      types.PatchType(contentType),
		updater:        updater,
	}
	if err := decodeOptions(w.req.Query, p.opts); err != nil {
		return nil, err
	}
	if errs := validation.ValidatePatchOptions(p.opts, p.patchType); len(errs) > 0 {
		return nil, invalidOptions("PatchOptions", errs)
	}
	p.opts.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("PatchOptions"))
	w.auditContext.recordPatch()
	p.directive = directiveOf(p.opts.FieldValidation)
	info, ok := runtime.SerializerInfoForMediaType(w.Serializer.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok {
		return nil, fmt.Errorf("no serializer defined for %v", runtime.ContentTypeJSON)
	}
	decode := info.Serializer
	if p.directive != metav1.FieldValidationIgnore {
		decode = info.StrictSerializer
	}
	p.codec = runtime.NewCodec(w.Serializer.EncoderForVersion(info.Serializer, w.Kind.GroupVersion()),
		w.Serializer.DecoderToVersion(decode, w.HubGroupVersion()))
	result, created, err := p.run(ctx)
	if err != nil {
		return nil, err
	}
	return w.encodeResult(ctx, createdOrOK(created), result)
}

func (p *patcher) run(ctx context.Context) (runtime.Object, bool, error) {
	create := createOptions(p.opts.DryRun, p.opts.FieldManager, p.opts.FieldValidation)
	update := &metav1.UpdateOptions{
		DryRun:          p.opts.DryRun,
		FieldManager:    p.opts.FieldManager,
		FieldValidation: p.opts.FieldValidation,
	}
	update.TypeMeta.SetGroupVersionKind(metav1.SchemeGroupVersion.WithKind("UpdateOptions"))
	transformers := []rest.TransformFunc{
		p.applyPatch,
		func(ctx context.Context, obj, current runtime.Object) (runtime.Object, error) {
			return obj, p.mutate(ctx, obj, current, create, update, p.opts.DryRun)
		},
		func(_ context.Context, obj, _ runtime.Object) (runtime.Object, error) {
			dedupOwnerReferences(ctx, obj, true)
			return obj, nil
		},
	}
	isApply := p.isApply()
	createValidation := p.validateCreate(rest.AdmissionToValidateObjectFunc(p.admit,
		p.attributes(nil, nil, p.req.Name, admission.Create, create, p.opts.DryRun), p))
	updateValidation := rest.AdmissionToValidateObjectUpdateFunc(p.admit,
		p.attributes(nil, nil, p.req.Name, admission.Update, update, p.opts.DryRun), p)
	created := false
	store := func() (obj runtime.Object, err error) {
		obj, created, err = p.updater.Update(ctx, p.req.Name, rest.DefaultUpdatedObjectInfo(nil, transformers...),
			createValidation, updateValidation, isApply, update)
		return obj, err
	}
	result, err := finish(ctx, func() (runtime.Object, error) {
		result, err := store()
		if isTooLarge(err) && !isApply {
			transformers = append(transformers, func(_ context.Context, obj, _ runtime.Object) (runtime.Object, error) {
				if m, merr := meta.Accessor(obj); merr == nil {
					m.SetManagedFields(nil)
				}
				return obj, nil
			})
			result, err = store()
		}
		return result, err
	})
	if apierrors.IsTimeout(err) { // as in upstream, a timeout does not report created
		return nil, false, err
	}
	return result, created, err
}

// isApply returns true for a server-side apply.
func (p *patcher) isApply() bool {
	return p.patchType == types.ApplyYAMLPatchType || p.patchType == types.ApplyCBORPatchType
}

// applyPatch returns the current object with the patch applied.
func (p *patcher) applyPatch(ctx context.Context, _, current runtime.Object) (runtime.Object, error) {
	exists, err := hasUID(current)
	if err != nil {
		return nil, err
	}
	var obj runtime.Object
	switch {
	case p.isApply():
		if !exists {
			if current, err = p.Creater.New(p.Kind); err != nil {
				return nil, fmt.Errorf("failed to create new object: %v", err)
			}
		}
		obj, err = p.applyServerSide(ctx, current)
	case !exists:
		return nil, apierrors.NewNotFound(p.Resource.GroupResource(), p.req.Name)
	case p.patchType == types.StrategicMergePatchType:
		obj, err = p.applyStrategicMerge(ctx, current)
	default:
		obj, err = p.applyJSON(ctx, current)
	}
	if err != nil {
		return nil, err
	}
	if named, err := hasUID(obj); err != nil {
		return nil, err
	} else if named && !exists {
		m, err := meta.Accessor(obj)
		if err != nil {
			return nil, err
		}
		return nil, apierrors.NewConflict(p.Resource.GroupResource(), p.req.Name,
			fmt.Errorf("uid mismatch: the provided object specified uid %s, and no existing object was found",
				m.GetUID()))
	}
	if m, err := meta.Accessor(obj); err == nil {
		if err := p.matchNamespace(m); err != nil {
			return nil, err
		}
	}
	return obj, checkName(obj, p.req.Name, p.req.Namespace)
}

func (p *patcher) applyJSON(ctx context.Context, current runtime.Object) (runtime.Object, error) {
	currentJSON, err := runtime.Encode(p.codec, current)
	if err != nil {
		return nil, err
	}
	patched, strictErrs, err := p.patchJSON(currentJSON)
	if err != nil {
		return nil, err
	}
	obj := p.updater.New()
	if err := runtime.DecodeInto(p.codec, patched, obj); err != nil {
		strict, ok := runtime.AsStrictDecodingError(err)
		if !ok {
			return nil, invalidPatch(string(patched), err)
		}
		strictErrs = append(strictErrs, strict.Errors()...)
	}
	if err := p.handleStrictErrors(ctx, strictErrs, func() string { return string(patched) }); err != nil {
		return nil, err
	}
	return p.FieldManager.Update(current, obj, managerOrUserAgent(p.opts.FieldManager, p.req.UserAgent)), nil
}

// handleStrictErrors adds errs as warnings or returns an error for them, as fieldValidation requires. It calls patched
// only for the error.
func (p *patcher) handleStrictErrors(ctx context.Context, errs []error, patched func() string) error {
	switch {
	case len(errs) == 0:
		return nil
	case p.directive == metav1.FieldValidationWarn:
		warnStrict(ctx, errs)
		return nil
	}
	return invalidPatch(patched(), runtime.NewStrictDecodingError(errs))
}

func invalidPatch(value string, err error) error {
	return apierrors.NewInvalid(schema.GroupKind{}, "",
		field.ErrorList{field.Invalid(field.NewPath("patch"), value, err.Error())})
}

// jsonPatchOp is an operation of a JSON patch. Strict decoding finds its unknown fields. It has the name of
// kube-apiserver's type, because errors of Go's JSON decoder contain it.
type jsonPatchOp struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	From  string `json:"from"`
	Value any    `json:"value"`
}

func (p *patcher) patchJSON(current []byte) (patched []byte, strictErrs []error, err error) {
	checkStrict := p.directive != metav1.FieldValidationIgnore
	if p.patchType == types.MergePatchType {
		if checkStrict {
			v := map[string]any{}
			if strictErrs, err = kjson.UnmarshalStrict(p.req.Body, &v); err != nil {
				return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding patch: %v", err))
			}
		}
		patched, err = jsonpatch.MergePatch(current, p.req.Body)
		if errors.Is(err, jsonpatch.ErrBadJSONPatch) {
			return nil, nil, apierrors.NewBadRequest(err.Error())
		}
		return patched, strictErrs, err
	}
	if checkStrict {
		var v []jsonPatchOp
		if strictErrs, err = kjson.UnmarshalStrict(p.req.Body, &v); err != nil {
			return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding patch: %v", err))
		}
		for i, e := range strictErrs {
			strictErrs[i] = fmt.Errorf("json patch %v", e)
		}
	}
	ops, err := jsonpatch.DecodePatch(p.req.Body)
	if err != nil {
		return nil, nil, apierrors.NewBadRequest(err.Error())
	}
	if len(ops) > maxJSONPatchOperations {
		return nil, nil, apierrors.NewRequestEntityTooLargeError(fmt.Sprintf("The allowed maximum operations in a "+
			"JSON patch is %d, got %d", maxJSONPatchOperations, len(ops)))
	}
	if patched, err = ops.Apply(current); err != nil {
		return nil, nil, apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "",
			schema.GroupResource{}, "", err.Error(), 0, false)
	}
	return patched, strictErrs, nil
}

func (p *patcher) applyStrategicMerge(ctx context.Context, current runtime.Object) (runtime.Object, error) {
	versioned, err := p.UnsafeConvertor.ConvertToVersion(current, p.Kind.GroupVersion())
	if err != nil {
		return nil, err
	}
	reference, err := p.UnsafeConvertor.ConvertToVersion(p.updater.New(), p.Kind.GroupVersion())
	if err != nil {
		return nil, err
	}
	result, err := p.Creater.New(p.Kind)
	if err != nil {
		return nil, err
	}
	original, err := runtime.DefaultUnstructuredConverter.ToUnstructured(versioned)
	if err != nil {
		return nil, err
	}
	patch := map[string]any{}
	var strictErrs []error
	checkStrict := p.directive != metav1.FieldValidationIgnore
	if checkStrict {
		strictErrs, err = kjson.UnmarshalStrict(p.req.Body, &patch)
	} else {
		err = kjson.UnmarshalCaseSensitivePreserveInts(p.req.Body, &patch)
	}
	if err != nil {
		return nil, apierrors.NewBadRequest(err.Error())
	}
	formatPatch := func() string { return fmt.Sprintf("%+v", patch) } // takes half a second for a patch of 150,000 keys
	patched, err := strategicMerge(ctx, original, patch, reference)
	if err != nil {
		return nil, strategicError(err)
	}
	if err := runtime.DefaultUnstructuredConverter.FromUnstructuredWithValidation(patched,
		result, checkStrict); err != nil {
		strict, ok := runtime.AsStrictDecodingError(err)
		if !ok {
			return nil, invalidPatch(formatPatch(), err)
		}
		strictErrs = append(strictErrs, strict.Errors()...)
	}
	if err := p.handleStrictErrors(ctx, strictErrs, formatPatch); err != nil {
		return nil, err
	}
	p.Defaulter.Default(result)
	obj, err := p.UnsafeConvertor.ConvertToVersion(result, p.HubGroupVersion())
	if err != nil {
		return nil, err
	}
	return p.FieldManager.Update(current, obj, managerOrUserAgent(p.opts.FieldManager, p.req.UserAgent)), nil
}

// strategicError returns the API error for an error of a strategic merge patch, as
// k8s.io/apiserver/pkg/endpoints/handlers/patch.go does.
func strategicError(err error) error {
	matches := func(targets ...error) bool {
		return slices.ContainsFunc(targets, func(e error) bool { return errors.Is(err, e) })
	}
	switch {
	case matches(mergepatch.ErrBadJSONDoc, mergepatch.ErrBadPatchFormatForPrimitiveList,
		mergepatch.ErrBadPatchFormatForRetainKeys, mergepatch.ErrBadPatchFormatForSetElementOrderList,
		mergepatch.ErrUnsupportedStrategicMergePatchFormat):
		return apierrors.NewBadRequest(err.Error())
	case matches(mergepatch.ErrNoListOfLists, mergepatch.ErrPatchContentNotMatchRetainKeys):
		return apierrors.NewGenericServerResponse(http.StatusUnprocessableEntity, "",
			schema.GroupResource{}, "", err.Error(), 0, false)
	}
	return err
}

func (p *patcher) applyServerSide(ctx context.Context, current runtime.Object) (runtime.Object, error) {
	unmarshal, unmarshalStrict := yaml.Unmarshal, yaml.UnmarshalStrict
	if p.patchType == types.ApplyCBORPatchType { // as in upstream's newApplyPatcher: duplicate keys are always rejected
		unmarshal, unmarshalStrict = cbor.Unmarshal, cbor.Unmarshal
	}
	patch := &unstructured.Unstructured{Object: map[string]any{}}
	if err := unmarshal(p.req.Body, &patch.Object); err != nil { // with upstream's text, also for CBOR
		return nil, apierrors.NewBadRequest(fmt.Sprintf("error decoding YAML: %v", err))
	}
	force := p.opts.Force != nil && *p.opts.Force
	obj, err := p.FieldManager.Apply(current, patch, p.opts.FieldManager, force)
	if err != nil || p.directive == metav1.FieldValidationIgnore {
		return obj, err
	}
	if err := unmarshalStrict(p.req.Body, &map[string]any{}); err != nil {
		if p.directive == metav1.FieldValidationStrict {
			return nil, apierrors.NewBadRequest(fmt.Sprintf("error strict decoding YAML: %v", err))
		}
		warnStrict(ctx, []error{err})
	}
	return obj, nil
}
