package admission

import (
	"context"
	"errors"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/warning"

	"watershed.dev/platform/recovery"
	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// validator is a chain with a configurable validation.
type validator struct {
	*admission.Handler
	validates func(context.Context, admission.Attributes) error
}

func (v validator) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	return v.validates(ctx, a)
}

// Validation in Admit counts only if it has no error, warning or annotation about the object.
func TestValidationInAdmitHasNoSideEffects(t *testing.T) {
	pods, before := corev1.SchemeGroupVersion.WithResource("pods"), testutil.ToFloat64(recovery.Metrics()[0])
	for title, c := range map[string]struct {
		validates func(context.Context, admission.Attributes) error
		ok        bool
	}{
		"nothing to say": {func(context.Context, admission.Attributes) error { return nil }, true},
		"a policy's name": {func(_ context.Context, a admission.Attributes) error {
			return a.AddAnnotation("pod-security.kubernetes.io/enforce-policy", "baseline:latest")
		}, true},
		"a violation": {func(_ context.Context, a admission.Attributes) error {
			return a.AddAnnotation("pod-security.kubernetes.io/audit-violations", "privileged")
		}, false},
		"a refusal": {func(context.Context, admission.Attributes) error { return errors.New("no") }, false},
		"a warning": {func(ctx context.Context, _ admission.Attributes) error {
			warning.AddWarning(ctx, "", "think twice")
			return nil
		}, false},
		"a panic": {func(context.Context, admission.Attributes) error { panic("no valid object") }, false},
	} {
		s := &Service{chain: admission.WithAudit(validator{admission.NewHandler(admission.Create), c.validates})}
		r := &admissionv1.Review{AuditLevel: commonv1.AuditLevel_AUDIT_LEVEL_METADATA}
		a := admission.NewAttributesRecord(nil, nil, pods.GroupVersion().WithKind("Pod"), "x", "n", pods, "",
			admission.Create, nil, false, &user.DefaultInfo{Name: "jane"})
		annotations, ok := s.validateInAdmit(t.Context(), r, a, nil)
		if ok != c.ok || ok && title == "a policy's name" && len(annotations) != 1 {
			t.Errorf("%s: %v, %v", title, annotations, ok)
		}
	}
	if n := testutil.ToFloat64(recovery.Metrics()[0]) - before; n != 1 {
		t.Errorf("%v panics are counted", n)
	}
}
