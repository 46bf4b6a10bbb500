package handlers_test

import (
	"errors"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	admissionv1 "watershed.dev/proto/watershed/admission/v1"
	commonv1 "watershed.dev/proto/watershed/common/v1"
	registryv1 "watershed.dev/proto/watershed/registry/v1"
	"watershed.dev/services/registry/internal/fixture"
)

// A write calls both admission phases. Admission can change the object and can reject the write.
func TestAdmissionCallbacks(t *testing.T) {
	fx := fixture.New(t)
	both := func(operation string) []string {
		return []string{"ADMIT " + operation, "VALIDATE " + operation}
	}
	refuse := func(phase registryv1.Phase) func(registryv1.Phase, *admissionv1.Review) (*admissionv1.Verdict, error) {
		return func(p registryv1.Phase, _ *admissionv1.Review) (*admissionv1.Verdict, error) {
			if p == phase {
				return nil, apierrors.NewForbidden(schema.GroupResource{Resource: "configmaps"},
					"a", errors.New("not today"))
			}
			return &admissionv1.Verdict{Warnings: []string{"think twice"}}, nil
		}
	}
	change := func(p registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error) {
		if p != registryv1.Phase_PHASE_ADMIT {
			return &admissionv1.Verdict{}, nil
		}
		return &admissionv1.Verdict{Object: []byte(strings.Replace(string(r.Object), "plain", "fancy", 1))}, nil
	}
	body := configMap("a", `},"data":{"k":"plain"}`)
	run(t, fx,
		write{
			verb:   "create",
			body:   body,
			review: refuse(registryv1.Phase_PHASE_ADMIT),
			fails:  `403 Forbidden configmaps "a" is forbidden: not today`,
		},
		write{verb: "create", body: body, review: refuse(registryv1.Phase_PHASE_VALIDATE), fails: `403 Forbidden`},
		write{verb: "delete", name: "a", fails: "404 NotFound"}, // nothing was written
		write{verb: "create", body: body, review: change, code: 201, check: data("k=fancy"), reviews: both("CREATE")},
		write{verb: "update", name: "a", body: body, code: 200, check: data("k=plain"), reviews: both("UPDATE")},
		write{verb: "delete", name: "a", review: refuse(registryv1.Phase_PHASE_VALIDATE), fails: "403 Forbidden"},
		write{verb: "delete", name: "a", code: 200},
	)
}

// An object that was validated in the admit phase is not reviewed again. Any other object is.
func TestValidateInAdmit(t *testing.T) {
	fx := fixture.New(t)
	pods := &commonv1.Resource{Version: "v1", Resource: "pods"}
	const generated = `"generateName":"p-"`
	for name, c := range map[string]struct {
		validated bool
		atOnce    []admissionv1.Operation
		asks      string
	}{
		"validated":     {true, fixture.Operations, "ADMIT CREATE"},
		"not validated": {false, fixture.Operations, "ADMIT CREATE, VALIDATE CREATE"},
		"not requested": {true, nil, "ADMIT CREATE, VALIDATE CREATE"},
	} {
		callbacks := &fixture.Callbacks{
			OnReview: func(p registryv1.Phase, r *admissionv1.Review) (*admissionv1.Verdict, error) {
				if r.Validate != (p == registryv1.Phase_PHASE_ADMIT && c.atOnce != nil) {
					t.Errorf("%s: %v has Validate %v", name, p, r.Validate)
				}
				return &admissionv1.Verdict{Validated: c.validated}, nil
			},
		}
		_, err := fx.Write(t.Context(), pods, &registryv1.WriteRequest{
			Verb: "create",
			Body: []byte(`{"apiVersion":"v1","kind":"Pod","metadata":{` + generated +
				`},"spec":{"containers":[{"name":"c","image":"i"}]}}`),
			ValidateInAdmit: c.atOnce,
		}, callbacks)
		if got := strings.Join(callbacks.Reviews, ", "); err != nil || got != c.asks {
			t.Errorf("%s: callbacks %s, error %v", name, got, err)
		}
	}
}
