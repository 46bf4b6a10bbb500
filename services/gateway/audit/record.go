package audit

import (
	"context"
	"encoding/json"
	"io"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"

	commonv1 "watershed.dev/proto/watershed/common/v1"
)

var truncatedEvents = prometheus.NewCounter(prometheus.CounterOpts{
	Name: "watershed_gateway_audit_truncated_events_total",
	Help: "Audit events written without objects: the queue (--audit-*-batch-buffer-bytes) or the log file had no room.",
})

// Metrics returns the collectors of the package. Upstream's apiserver_audit_* are in the registry of Kubernetes'
// libraries.
func Metrics() []prometheus.Collector { return []prometheus.Collector{truncatedEvents} }

// levels maps upstream's levels to the contract's.
var levels = map[auditinternal.Level]commonv1.AuditLevel{
	auditinternal.LevelMetadata:        commonv1.AuditLevel_AUDIT_LEVEL_METADATA,
	auditinternal.LevelRequest:         commonv1.AuditLevel_AUDIT_LEVEL_REQUEST,
	auditinternal.LevelRequestResponse: commonv1.AuditLevel_AUDIT_LEVEL_REQUEST_RESPONSE,
}

// Level returns the audit level of the request of ctx.
func Level(ctx context.Context) commonv1.AuditLevel {
	ac := audit.AuditContextFrom(ctx)
	if ac == nil {
		return commonv1.AuditLevel_AUDIT_LEVEL_UNSPECIFIED
	}
	return levels[ac.GetEventLevel()]
}

// Annotate adds another service's annotations to the event of ctx. Existing annotations keep their values.
func Annotate(ctx context.Context, annotations map[string]string) {
	if len(annotations) > 0 {
		audit.AddAuditAnnotationsMap(ctx, annotations)
	}
}

// RecordContext adds registry's audit context to the event of a write. body is the request's body, of a media type.
func RecordContext(ctx context.Context, auditContext *commonv1.AuditContext, mediaType string, body []byte) {
	if auditContext == nil || Level(ctx) == commonv1.AuditLevel_AUDIT_LEVEL_UNSPECIFIED {
		return
	}
	Annotate(ctx, auditContext.Annotations)
	if auditContext.RequestIsBody {
		audit.LogRequestPatch(ctx, patchJSON(mediaType, body))
	}
	if o := auditContext.Object; o != nil {
		audit.LogRequestObject(ctx, &rawObject{
			ObjectMeta: metav1.ObjectMeta{
				Namespace:       o.Namespace,
				Name:            o.Name,
				UID:             types.UID(o.Uid),
				ResourceVersion: o.ResourceVersion,
			},
			json: auditContext.RequestObject,
		}, schema.GroupVersion{}, schema.GroupVersionResource{}, "", rawSerializer{})
	}
	if len(auditContext.Status) > 0 {
		var s metav1.Status
		if json.Unmarshal(auditContext.Status, &s) == nil {
			audit.AuditContextFrom(ctx).LogResponseObject(&s, nil)
		}
	}
}

// IncludesResponse reports whether the event of ctx contains the response object.
func IncludesResponse(ctx context.Context) bool {
	return Level(ctx) == commonv1.AuditLevel_AUDIT_LEVEL_REQUEST_RESPONSE
}

// RecordResponse adds the body of a response to the event. It omits a body that is no object or whose type is unknown
// here.
func RecordResponse(ctx context.Context, mediaType string, body []byte) {
	data, err := toJSON(mediaType, body)
	if err != nil {
		audit.HandlePluginError("response", err)
		return
	}
	audit.LogResponseObject(ctx, &rawObject{json: data}, schema.GroupVersion{}, rawSerializer{})
}

// rawObject is an object that is already encoded in JSON, in the form that upstream's audit functions accept.
type rawObject struct {
	metav1.TypeMeta
	metav1.ObjectMeta
	json []byte
	// omitManagedFields is set if the policy omits managedFields.
	omitManagedFields bool
}

// DeepCopyObject implements runtime.Object. The copy shares the bytes, which are immutable.
func (o *rawObject) DeepCopyObject() runtime.Object {
	copied := *o
	return &copied
}

// SetManagedFields implements metav1.Object. Upstream calls it with nil to omit managedFields.
func (o *rawObject) SetManagedFields(f []metav1.ManagedFieldsEntry) { o.omitManagedFields = f == nil }

// rawSerializer writes a rawObject's bytes.
type rawSerializer struct{ runtime.NegotiatedSerializer }

// SupportedMediaTypes implements runtime.NegotiatedSerializer.
func (rawSerializer) SupportedMediaTypes() []runtime.SerializerInfo {
	return []runtime.SerializerInfo{{MediaType: runtime.ContentTypeJSON}}
}

// EncoderForVersion implements runtime.NegotiatedSerializer.
func (rawSerializer) EncoderForVersion(runtime.Encoder, runtime.GroupVersioner) runtime.Encoder {
	return rawSerializer{}
}

// Identifier implements runtime.Encoder.
func (rawSerializer) Identifier() runtime.Identifier { return "as it is" }

// Encode implements runtime.Encoder.
func (rawSerializer) Encode(obj runtime.Object, w io.Writer) error {
	o := obj.(*rawObject)
	data := o.json
	if o.omitManagedFields {
		data = withoutManagedFields(data)
	}
	_, err := w.Write(data)
	return err
}

// withoutManagedFields removes managedFields from an object, from the items of a list and from the objects of a Table.
// It keeps content that it cannot decode. It does not recurse, because an object may contain rows in rows to any depth.
func withoutManagedFields(data []byte) []byte {
	var top map[string]json.RawMessage
	if json.Unmarshal(data, &top) != nil {
		return data
	}
	removeManagedFields(top)
	eachItem(top, "items", removeManagedFields)
	if string(top["kind"]) == `"Table"` {
		eachItem(top, "rows", func(row map[string]json.RawMessage) {
			var inner map[string]json.RawMessage
			if raw, ok := row["object"]; ok && json.Unmarshal(raw, &inner) == nil && inner != nil {
				removeManagedFields(inner)
				row["object"] = mustMarshal(inner)
			}
		})
	}
	return mustMarshal(top)
}

// eachItem calls change for each object of a list.
func eachItem(top map[string]json.RawMessage, key string, change func(map[string]json.RawMessage)) {
	var items []map[string]json.RawMessage
	if raw, ok := top[key]; !ok || json.Unmarshal(raw, &items) != nil || items == nil {
		return
	}
	for _, item := range items {
		if item != nil {
			change(item)
		}
	}
	top[key] = mustMarshal(items)
}

func removeManagedFields(object map[string]json.RawMessage) {
	var meta map[string]json.RawMessage
	if raw, ok := object["metadata"]; !ok || json.Unmarshal(raw, &meta) != nil || meta == nil {
		return
	}
	if _, ok := meta["managedFields"]; ok {
		delete(meta, "managedFields")
		object["metadata"] = mustMarshal(meta)
	}
}

// mustMarshal returns v in JSON. It panics on an error, which values that were decoded from JSON cannot cause.
func mustMarshal(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}

// mediaTypeOf returns a Content-Type without its parameters.
func mediaTypeOf(contentType string) string {
	t, _, _ := strings.Cut(contentType, ";")
	return strings.TrimSpace(t)
}
