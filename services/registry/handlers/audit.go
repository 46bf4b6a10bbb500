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

// auditContext gathers what a write's audit event is to say of it (k8s.io/apiserver/pkg/audit, request.go). Of a write that is
// not audited it is nil, and gathers nothing.
type auditContext struct {
	level commonv1.AuditLevel
	// annotations are what upstream's storages write.
	annotations *audit.AuditContext
	proto       commonv1.AuditContext
}

// newAuditContext returns a context in which annotations are gathered, and what gathers them.
func newAuditContext(ctx context.Context, level commonv1.AuditLevel) (context.Context, *auditContext) {
	if level == commonv1.AuditLevel_AUDIT_LEVEL_UNSPECIFIED {
		return ctx, nil
	}
	ctx = audit.WithAuditContext(ctx)
	return ctx, &auditContext{level: level, annotations: audit.AuditContextFrom(ctx)}
}

// recordRequest takes down the request's object as it was read. One that cannot be written is left out.
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
		slog.ErrorContext(ctx, "A request's object is not audited", "error", err)
		a.proto.Object = nil
		return
	}
	a.proto.RequestObject = b.Bytes()
}

// recordPatch says that the request's body is its object.
func (a *auditContext) recordPatch() {
	if a != nil {
		a.proto.RequestIsBody = a.level >= commonv1.AuditLevel_AUDIT_LEVEL_REQUEST
	}
}

// recordStatus takes down the answer where it is a Status.
func (a *auditContext) recordStatus(result runtime.Object) {
	s, ok := result.(*metav1.Status)
	if a == nil || !ok {
		return
	}
	if data, err := json.Marshal(s); err == nil {
		a.proto.Status = data
	}
}

// finish is what has been gathered, or nil.
func (a *auditContext) finish() *commonv1.AuditContext {
	if a == nil {
		return nil
	}
	a.proto.Annotations = a.annotations.GetEventAnnotations()
	return &a.proto
}
