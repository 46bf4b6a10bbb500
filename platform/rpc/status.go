// Package rpc is how the services talk: gRPC with mutual TLS, of which Unix sockets have the handshake (socketCredentials), or
// the same contracts inside one process.
//
// It knows nothing of what is said. Errors are the one exception: a Kubernetes API error crosses a hop whole, as a
// metav1.Status in the details of the gRPC status, and comes out as the API error that it was.
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

// ToStatus makes err fit to be returned from a gRPC handler. API errors keep their whole metav1.Status.
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
	// gRPC's own field is checked for UTF-8; the detail has the message as it is.
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
	// maxStatusMessage is how much of an error's message gRPC's own field has, which is for logs.
	maxStatusMessage = 1 << 10
	// maxDetails bounds what an error's details take: they are headers, of which a connection takes 16 MB, base64 and
	// all, and breaks for all who share it where there are more.
	maxDetails = 4 << 20
)

// truncated is a Status that fits: who names an object with 3 MB is told the beginning of it.
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

// withDetails is the status of an error that is not the API's own, with what is told beside it.
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

// ToAPIStatus is what kube-apiserver answers for an error that is not the API's own: 500, with the error's text and no reason
// (k8s.io/apiserver/pkg/endpoints/handlers/responsewriters, ErrorToAPIStatus).
func ToAPIStatus(err error) *apierrors.StatusError {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Message: err.Error(),
	}}
}

// WarnedError is an API error with the warnings that were given before it.
type WarnedError struct {
	error
	Warnings []string
}

// Unwrap gives the API error.
func (w *WarnedError) Unwrap() error { return w.error }

// WithWarnings attaches warnings, if any.
func WithWarnings(err error, warnings []string) error {
	if err == nil || len(warnings) == 0 {
		return err
	}
	return &WarnedError{err, warnings}
}

// Warnings are those that were given before an error.
func Warnings(err error) []string {
	var warned *WarnedError
	if errors.As(err, &warned) {
		return warned.Warnings
	}
	return nil
}

// auditedError is an API error with what the audit event says of what came before it.
type auditedError struct {
	error
	audit *commonv1.AuditContext
}

func (t *auditedError) Unwrap() error { return t.error }

// WithAuditContext attaches what is to be audited, if anything.
func WithAuditContext(err error, audit *commonv1.AuditContext) error {
	if err == nil || audit == nil {
		return err
	}
	return &auditedError{err, audit}
}

// AuditContextOf is what is to be audited of a request that ended with an error.
func AuditContextOf(err error) *commonv1.AuditContext {
	var audited *auditedError
	if errors.As(err, &audited) {
		return audited.audit
	}
	return nil
}

// WithoutDetails is the error without what is told beside it.
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

// FromStatus is ToStatus's inverse. An error that carries no metav1.Status comes back as the one kube-apiserver would
// give: a lost peer is 503 with Retry-After, a passed deadline 504, anything else 500.
func FromStatus(err error) error {
	if err == nil {
		return nil
	}
	st, ok := status.FromError(err)
	if !ok {
		return err
	}
	details := &commonv1.Status{}
	for _, d := range st.Details() {
		if p, ok := d.(*commonv1.Status); ok {
			if details = p; len(p.Json) > 0 {
				return WithAuditContext(WithWarnings(APIError(p), p.Warnings), p.Audit)
			}
		}
	}
	return WithAuditContext(WithWarnings(fromCode(st), details.Warnings), details.Audit)
}

// fromCode is the API error for a status that carries none.
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

// StatusProto wraps s for the wire.
func StatusProto(s *metav1.Status) *commonv1.Status {
	b, err := json.Marshal(s)
	if err != nil { // a Status holds only strings and numbers
		panic(err)
	}
	return &commonv1.Status{Json: b}
}

// APIError is StatusProto's inverse.
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
