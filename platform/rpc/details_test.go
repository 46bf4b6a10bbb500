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

// The warnings and the audit context of an error cross a call, for every kind of error, and do not change the error.
func TestErrorDetailsCross(t *testing.T) {
	trail := &commonv1.AuditContext{Annotations: map[string]string{"a": "b"}}
	for name, c := range map[string]struct {
		err error
		is  func(error) bool
	}{
		"an API error": {apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "n"), apierrors.IsNotFound},
		"a status":     {status.Error(codes.Unavailable, "away"), apierrors.IsServiceUnavailable},
		"a deadline":   {context.DeadlineExceeded, apierrors.IsTimeout},
		"another":      {errors.New("text"), func(err error) bool { return strings.Contains(err.Error(), "text") }},
	} {
		for _, err := range []error{
			WithAuditContext(WithWarnings(c.err, []string{"w"}), trail),
			WithWarnings(WithAuditContext(c.err, trail), []string{"w"}),
		} {
			if !errors.Is(WithoutDetails(err), c.err) || AuditContextOf(WithoutDetails(err)) != nil ||
				Warnings(WithoutDetails(err)) != nil {
				t.Errorf("%s: %v is not bare", name, WithoutDetails(err))
			}
			got := FromStatus(ToStatus(err))
			if !c.is(got) || !c.is(WithoutDetails(got)) || len(Warnings(got)) != 1 ||
				!proto.Equal(AuditContextOf(got), trail) {
				t.Errorf("%s: %v, %v, %v", name, got, Warnings(got), AuditContextOf(got))
			}
		}
		if got := FromStatus(ToStatus(c.err)); !c.is(got) || Warnings(got) != nil || AuditContextOf(got) != nil {
			t.Errorf("%s, without details: %v", name, got)
		}
	}
}

// An error fits into the headers of a connection, for any input of a client.
func TestAnErrorFitsItsHeaders(t *testing.T) {
	long := strings.Repeat("<", 3<<20)
	var causes field.ErrorList
	for range 100_000 {
		causes = append(causes, field.Invalid(field.NewPath("metadata", "name"), "<<<<<<<<<<<", "it is <bad>"))
	}
	kind := schema.GroupKind{Kind: "Pod"}
	for name, err := range map[string]error{
		"a long name":    apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, long),
		"a long message": errors.New(long),
		"a long cause": apierrors.NewInvalid(kind, "n",
			field.ErrorList{field.Invalid(field.NewPath("a"), long, long)}),
		"many causes":   apierrors.NewInvalid(kind, "n", causes),
		"a long object": WithAuditContext(errors.New("e"), &commonv1.AuditContext{RequestObject: []byte(long + long)}),
		"a long status": status.Error(codes.Unavailable, long),
		"a status beside": WithAuditContext(status.Error(codes.Unavailable, "e"),
			&commonv1.AuditContext{RequestObject: []byte(long + long)}),
	} {
		st, _ := status.FromError(ToStatus(err))
		if n := proto.Size(st.Proto()); n > maxDetails+(64<<10) {
			t.Errorf("%s takes %d bytes", name, n)
		}
		if got := FromStatus(st.Err()); got == nil || got.Error() == "" {
			t.Errorf("%s is lost", name)
		}
	}
}
