package handlers

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/audit"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

// auditContext collects a write's part of its audit event (k8s.io/apiserver/pkg/audit, request.go). It is nil for a
// write that is not audited, and then collects nothing.
type auditContext struct {
	level commonv1.AuditLevel
	// annotations collects the audit annotations of upstream's storages.
	annotations *audit.AuditContext
	proto       commonv1.AuditContext
}

// newAuditContext returns a context that collects audit annotations, and its auditContext.
func newAuditContext(ctx context.Context, level commonv1.AuditLevel) (context.Context, *auditContext) {
	if level == commonv1.AuditLevel_AUDIT_LEVEL_UNSPECIFIED {
		return ctx, nil
	}
	ctx = audit.WithAuditContext(ctx)
	return ctx, &auditContext{level: level, annotations: audit.AuditContextFrom(ctx)}
}

// recordRequest records the request's decoded object. It omits an object that cannot be encoded.
func (a *auditContext) recordRequest(ctx context.Context, obj runtime.Object, gv schema.GroupVersion,
	codecs runtime.NegotiatedSerializer) {
	if a == nil {
		return
	}
	a.proto.Object = &commonv1.ObjectReference{}
	if m, err := meta.Accessor(obj); err == nil {
		a.proto.Object = &commonv1.ObjectReference{
			Namespace:       m.GetNamespace(),
			Name:            m.GetName(),
			Uid:             string(m.GetUID()),
			ResourceVersion: m.GetResourceVersion(),
		}
	}
	if a.level < commonv1.AuditLevel_AUDIT_LEVEL_REQUEST {
		return
	}
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok {
		return
	}
	var b bytes.Buffer
	if err := codecs.EncoderForVersion(info.Serializer, gv).Encode(obj, &b); err != nil {
		slog.ErrorContext(ctx, "Cannot encode a request's object for its audit event", "error", err)
		a.proto.Object = nil
		return
	}
	a.proto.RequestObject = b.Bytes()
}

// recordPatch records that the request's body is the audited object.
func (a *auditContext) recordPatch() {
	if a != nil {
		a.proto.RequestIsBody = a.level >= commonv1.AuditLevel_AUDIT_LEVEL_REQUEST
	}
}

// recordStatus records the response if it is a Status.
func (a *auditContext) recordStatus(result runtime.Object) {
	s, ok := result.(*metav1.Status)
	if a == nil || !ok {
		return
	}
	if data, err := json.Marshal(s); err == nil {
		a.proto.Status = data
	}
}

// finish returns the collected data, or nil.
func (a *auditContext) finish() *commonv1.AuditContext {
	if a == nil {
		return nil
	}
	a.proto.Annotations = a.annotations.GetEventAnnotations()
	return &a.proto
}
