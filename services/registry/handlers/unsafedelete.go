package handlers

import (
	"context"
	"errors"
	"fmt"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/registry/rest"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/utils/ptr"
)

// ignoresReadErrors reports whether a delete is also for an object that cannot be decoded or decrypted (KEP 3926). Only
// the feature gate AllowUnsafeMalformedObjectDeletion leaves the option set.
func ignoresReadErrors(opts *metav1.DeleteOptions) bool {
	return ptr.Deref(opts.IgnoreStoreReadErrorWithClusterBreakingPotential, false)
}

// dropIgnoreReadErrors clears the option of ignoresReadErrors, unless the feature gate is enabled.
func dropIgnoreReadErrors(opts *metav1.DeleteOptions) {
	if !utilfeature.DefaultFeatureGate.Enabled(features.AllowUnsafeMalformedObjectDeletion) {
		opts.IgnoreStoreReadErrorWithClusterBreakingPotential = nil
	}
}

// errUnsafeCollection is the error of a deletecollection that ignores read errors.
func errUnsafeCollection() error {
	return invalidOptions("DeleteOptions", fieldErrors{field.Invalid(
		field.NewPath("ignoreStoreReadErrorWithClusterBreakingPotential"), true,
		"is not allowed with DELETECOLLECTION, try again after removing the option")})
}

// unsafeDeleter returns upstream's deleter of unreadable objects, if the user may use it. The function and its texts
// follow k8s.io/apiserver/pkg/endpoints/handlers, DeleteResource and authorizeUnsafeDelete.
func (w *writeOperation) unsafeDeleter(ctx context.Context, attrs admission.Attributes) (rest.GracefulDeleter, error) {
	audit.AddAuditAnnotation(ctx, "apiserver.k8s.io/unsafe-delete-ignore-read-error", "")
	p, ok := w.Storage.(rest.CorruptObjectDeleterProvider)
	if !ok || p.GetCorruptObjDeleter() == nil {
		return nil, apierrors.NewInternalError(errors.New("no unsafe deleter provided, can not honor " +
			"ignoreStoreReadErrorWithClusterBreakingPotential"))
	}
	if attrs.GetSubresource() != "" {
		return nil, admission.NewForbidden(attrs, errors.New("ignoreStoreReadErrorWithClusterBreakingPotential "+
			"delete option is not allowed on a subresource or non-resource request"))
	}
	const verb = "unsafe-delete-ignore-read-errors"
	decision, reason, err := Authorizer{}.Authorize(ctx, authorizer.AttributesRecord{
		User:            attrs.GetUserInfo(),
		Verb:            verb,
		Namespace:       attrs.GetNamespace(),
		Name:            attrs.GetName(),
		APIGroup:        attrs.GetResource().Group,
		APIVersion:      attrs.GetResource().Version,
		Resource:        attrs.GetResource().Resource,
		ResourceRequest: true,
	})
	switch {
	case err != nil:
		return nil, admission.NewForbidden(attrs, fmt.Errorf("error while checking permission for %q, %w", verb, err))
	case decision != authorizer.DecisionAllow:
		return nil, admission.NewForbidden(attrs, fmt.Errorf("not permitted to do %q, reason: %s", verb, reason))
	}
	return p.GetCorruptObjDeleter(), nil
}
