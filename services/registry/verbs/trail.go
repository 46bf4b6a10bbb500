package verbs

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

// trail gathers what a write's audit event is to say of it (k8s.io/apiserver/pkg/audit, request.go). Of a write that is
// not audited it is nil, and gathers nothing.
type trail struct {
	level commonv1.AuditLevel
	// annotations are what upstream's storages write.
	annotations *audit.AuditContext
	gathered    commonv1.AuditContext
}

// recordTrail returns a context in which annotations are gathered, and what gathers them.
func recordTrail(ctx context.Context, level commonv1.AuditLevel) (context.Context, *trail) {
	if level == commonv1.AuditLevel_AUDIT_LEVEL_UNSPECIFIED {
		return ctx, nil
	}
	ctx = audit.WithAuditContext(ctx)
	return ctx, &trail{level: level, annotations: audit.AuditContextFrom(ctx)}
}

// requested takes down the request's object as it was read. One that cannot be written is left out.
func (t *trail) requested(ctx context.Context, obj runtime.Object, gv schema.GroupVersion,
	codecs runtime.NegotiatedSerializer) {
	if t == nil {
		return
	}
	t.gathered.Object = &commonv1.ObjectReference{}
	if m, err := meta.Accessor(obj); err == nil {
		t.gathered.Object = &commonv1.ObjectReference{
			Namespace:       m.GetNamespace(),
			Name:            m.GetName(),
			Uid:             string(m.GetUID()),
			ResourceVersion: m.GetResourceVersion(),
		}
	}
	if t.level < commonv1.AuditLevel_AUDIT_LEVEL_REQUEST {
		return
	}
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok {
		return
	}
	var b bytes.Buffer
	if err := codecs.EncoderForVersion(info.Serializer, gv).Encode(obj, &b); err != nil {
		slog.ErrorContext(ctx, "A request's object is not audited", "error", err)
		t.gathered.Object = nil
		return
	}
	t.gathered.RequestObject = b.Bytes()
}

// patched says that the request's body is its object.
func (t *trail) patched() {
	if t != nil {
		t.gathered.RequestIsBody = t.level >= commonv1.AuditLevel_AUDIT_LEVEL_REQUEST
	}
}

// answered takes down the answer where it is a Status.
func (t *trail) answered(result runtime.Object) {
	s, ok := result.(*metav1.Status)
	if t == nil || !ok {
		return
	}
	if data, err := json.Marshal(s); err == nil {
		t.gathered.Status = data
	}
}

// end is what has been gathered, or nil.
func (t *trail) end() *commonv1.AuditContext {
	if t == nil {
		return nil
	}
	t.gathered.Annotations = t.annotations.GetEventAnnotations()
	return &t.gathered
}
