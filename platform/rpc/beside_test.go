package rpc

import (
	"context"
	"errors"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// What is told beside an error crosses a hop with it, whatever the error is, and does not change what it is.
func TestWhatIsToldBesideAnErrorCrosses(t *testing.T) {
	trail := &commonv1.AuditContext{Annotations: map[string]string{"a": "b"}}
	for what, c := range map[string]struct {
		err error
		is  func(error) bool
	}{
		"an API error": {apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "n"), apierrors.IsNotFound},
		"a status":     {status.Error(codes.Unavailable, "away"), apierrors.IsServiceUnavailable},
		"a deadline":   {context.DeadlineExceeded, apierrors.IsTimeout},
		"another":      {errors.New("text"), func(err error) bool { return strings.Contains(err.Error(), "text") }},
	} {
		for _, err := range []error{
			WithTrail(WithWarnings(c.err, []string{"w"}), trail), WithWarnings(WithTrail(c.err, trail), []string{"w"}),
		} {
			if !errors.Is(Bare(err), c.err) || Trail(Bare(err)) != nil || Warnings(Bare(err)) != nil {
				t.Errorf("%s: %v is not bare", what, Bare(err))
			}
			got := FromStatus(ToStatus(err))
			if !c.is(got) || !c.is(Bare(got)) || len(Warnings(got)) != 1 || !proto.Equal(Trail(got), trail) {
				t.Errorf("%s: %v, %v, %v", what, got, Warnings(got), Trail(got))
			}
		}
		if got := FromStatus(ToStatus(c.err)); !c.is(got) || Warnings(got) != nil || Trail(got) != nil {
			t.Errorf("%s, alone: %v", what, got)
		}
	}
}

// An error never takes more than a connection has room for, whatever a client has put into it.
func TestAnErrorFitsItsHeaders(t *testing.T) {
	long := strings.Repeat("<", 3<<20)
	var causes field.ErrorList
	for range 100_000 {
		causes = append(causes, field.Invalid(field.NewPath("metadata", "name"), "<<<<<<<<<<<", "it is <bad>"))
	}
	kind := schema.GroupKind{Kind: "Pod"}
	for what, err := range map[string]error{
		"a long name":     apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, long),
		"a long message":  errors.New(long),
		"a long cause":    apierrors.NewInvalid(kind, "n", field.ErrorList{field.Invalid(field.NewPath("a"), long, long)}),
		"many causes":     apierrors.NewInvalid(kind, "n", causes),
		"a long object":   WithTrail(errors.New("e"), &commonv1.AuditContext{RequestObject: []byte(long + long)}),
		"a long status":   status.Error(codes.Unavailable, long),
		"a status beside": WithTrail(status.Error(codes.Unavailable, "e"), &commonv1.AuditContext{RequestObject: []byte(long + long)}),
	} {
		st, _ := status.FromError(ToStatus(err))
		if n := proto.Size(st.Proto()); n > maxDetails+(64<<10) {
			t.Errorf("%s takes %d bytes", what, n)
		}
		if got := FromStatus(st.Err()); got == nil || got.Error() == "" {
			t.Errorf("%s is lost", what)
		}
	}
}
