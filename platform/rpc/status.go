package rpc

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// ToStatus converts err to the error that a gRPC handler returns. An API error keeps its metav1.Status, up to
// maxDetails.
func ToStatus(err error) error {
	if err == nil {
		return nil
	}
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		if st, ok := status.FromError(err); ok {
			if !utf8.ValidString(st.Message()) {
				st = status.New(st.Code(), strings.ToValidUTF8(st.Message(), "\ufffd"))
			}
			return withDetails(st, err).Err()
		}
		if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
			return withDetails(status.FromContextError(err), err).Err()
		}
		api = ToAPIStatus(err)
	}
	s := truncated(api.Status())
	// gRPC requires UTF-8 in its own field. The detail has the longer message.
	st := status.New(codeOf(s.Code), strings.ToValidUTF8(s.Message[:min(len(s.Message), maxStatusMessage)], "\ufffd"))
	detail := StatusProto(&s)
	detail.Warnings, detail.Audit = Warnings(err), AuditContextOf(err)
	if len(detail.Json)+proto.Size(detail.Audit) > maxDetails {
		detail.Audit = nil
	}
	if with, derr := st.WithDetails(detail); derr == nil {
		st = with
	}
	return st.Err()
}

const (
	// maxStatusMessage bounds the message in gRPC's own field, which is for logs.
	maxStatusMessage = 1 << 10
	// maxDetails bounds the details of an error. They are sent as headers, in base64, and a connection accepts 16 MB
	// of headers. Larger headers break the connection for all its calls.
	maxDetails = 4 << 20
)

// truncated returns s, cut to a size that fits into maxDetails. A request may name an object with 3 MB: the error then
// has the beginning of the name.
func truncated(s metav1.Status) metav1.Status {
	size := len(s.Message)
	if d := s.Details; d != nil {
		size += len(d.Name)
		for _, c := range d.Causes {
			size += 64 + len(c.Message) + len(c.Field)
		}
	}
	if size < maxDetails/6 { // each byte may be escaped
		return s
	}
	const limit = maxDetails / 6 / 4
	s.Message = s.Message[:min(len(s.Message), limit)]
	if d := s.Details.DeepCopy(); d != nil {
		d.Name = d.Name[:min(len(d.Name), limit)]
		remaining := limit
		for i := range d.Causes {
			c := &d.Causes[i]
			c.Message = c.Message[:min(len(c.Message), remaining)]
			if remaining -= 64 + len(c.Message) + len(c.Field); remaining < 0 {
				d.Causes = d.Causes[:i]
				break
			}
		}
		s.Details = d
	}
	return s
}

// withDetails adds the warnings and the audit context of err to st, the status of an error that is not an API error.
func withDetails(st *status.Status, err error) *status.Status {
	detail := &commonv1.Status{Warnings: Warnings(err), Audit: AuditContextOf(err)}
	if detail.Warnings == nil && detail.Audit == nil || proto.Size(detail) > maxDetails {
		return st
	}
	if with, derr := st.WithDetails(detail); derr == nil {
		return with
	}
	return st
}

// ToAPIStatus converts an error that is not an API error as kube-apiserver does: code 500, the error's text, and no
// reason (k8s.io/apiserver/pkg/endpoints/handlers/responsewriters, ErrorToAPIStatus).
func ToAPIStatus(err error) *apierrors.StatusError {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Message: err.Error(),
	}}
}

// WarnedError is an error with the warnings that came before it.
type WarnedError struct {
	error
	Warnings []string
}

// Unwrap returns the error without the warnings.
func (w *WarnedError) Unwrap() error { return w.error }

// WithWarnings attaches warnings to err, if there are any.
func WithWarnings(err error, warnings []string) error {
	if err == nil || len(warnings) == 0 {
		return err
	}
	return &WarnedError{err, warnings}
}

// Warnings returns the warnings that WithWarnings attached to err.
func Warnings(err error) []string {
	var warned *WarnedError
	if errors.As(err, &warned) {
		return warned.Warnings
	}
	return nil
}

// IsUndecided reports whether err, which FromStatus has returned, says that a service has not decided: it is
// unavailable or too slow. Clients retry then.
func IsUndecided(err error) bool {
	return apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err)
}

// auditedError is an error with the audit context that came before it.
type auditedError struct {
	error
	audit *commonv1.AuditContext
}

func (t *auditedError) Unwrap() error { return t.error }

// WithAuditContext attaches an audit context to err, unless it is nil.
func WithAuditContext(err error, audit *commonv1.AuditContext) error {
	if err == nil || audit == nil {
		return err
	}
	return &auditedError{err, audit}
}

// AuditContextOf returns the audit context that WithAuditContext attached to err, or nil.
func AuditContextOf(err error) *commonv1.AuditContext {
	var audited *auditedError
	if errors.As(err, &audited) {
		return audited.audit
	}
	return nil
}

// WithoutDetails returns err without its warnings and audit context.
func WithoutDetails(err error) error {
	for {
		switch e := err.(type) { //nolint:errorlint // it is this very error that is taken off
		case *WarnedError:
			err = e.error
		case *auditedError:
			err = e.error
		default:
			return err
		}
	}
}

// FromStatus is ToStatus's inverse. An error without a metav1.Status becomes an API error of kube-apiserver. A lost
// peer is 503 with Retry-After, an exceeded deadline 504, and any other code 500. A canceled call becomes
// context.Canceled.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	details := statusDetails(st)
	result := fromCode(st)
	if len(details.GetJson()) > 0 {
		result = APIError(details)
	}
	return WithAuditContext(WithWarnings(result, details.GetWarnings()), details.GetAudit())
}

// HasAPIError reports whether the error of a call is an API error of the peer. Other errors are of the connection, of
// gRPC or of a panic.
func HasAPIError(err error) bool {
	st, ok := status.FromError(err)
	if !ok { // of a call in the process
		return errors.As(err, new(apierrors.APIStatus))
	}
	return len(statusDetails(st).GetJson()) > 0
}

// statusDetails returns the metav1.Status, warnings and audit context of a status. They are nil if it has none.
func statusDetails(st *status.Status) *commonv1.Status {
	for _, d := range st.Details() {
		if p, ok := d.(*commonv1.Status); ok {
			return p
		}
	}
	return nil
}

// fromCode returns the error for a status without a metav1.Status.
func fromCode(st *status.Status) error {
	switch st.Code() {
	case codes.Unavailable:
		e := apierrors.NewServiceUnavailable("the server is currently unable to handle the request: " + st.Message())
		e.ErrStatus.Details = &metav1.StatusDetails{RetryAfterSeconds: 1}
		return e
	case codes.DeadlineExceeded:
		return apierrors.NewTimeoutError("the request did not complete within the allotted timeout", 0)
	case codes.Canceled:
		return context.Canceled
	}
	return apierrors.NewInternalError(errors.New(st.Message()))
}

// StatusProto encodes s for the wire.
func StatusProto(s *metav1.Status) *commonv1.Status {
	b, err := json.Marshal(s)
	if err != nil { // a Status holds only strings and numbers
		panic(err)
	}
	return &commonv1.Status{Json: b}
}

// APIError decodes an API error that StatusProto has encoded.
func APIError(p *commonv1.Status) error {
	e := &apierrors.StatusError{}
	if err := json.Unmarshal(p.GetJson(), &e.ErrStatus); err != nil {
		return apierrors.NewInternalError(err)
	}
	return e
}

func codeOf(httpCode int32) codes.Code {
	switch httpCode {
	case http.StatusNotFound:
		return codes.NotFound
	case http.StatusConflict:
		return codes.Aborted
	case http.StatusForbidden:
		return codes.PermissionDenied
	case http.StatusUnauthorized:
		return codes.Unauthenticated
	case http.StatusTooManyRequests:
		return codes.ResourceExhausted
	case http.StatusGone:
		return codes.OutOfRange
	}
	if httpCode >= 400 && httpCode < 500 {
		return codes.InvalidArgument
	}
	return codes.Unknown
}
