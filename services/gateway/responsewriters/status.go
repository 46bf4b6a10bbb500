// Package responsewriters writes the gateway's own responses: statuses, discovery objects, and the errors of
// kube-apiserver's web framework (go-restful). Package body writes the responses of resources.
package responsewriters

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"watershed.dev/services/gateway/audit"
)

// Scheme and Codecs encode the gateway's own objects.
var (
	Scheme = runtime.NewScheme()
	Codecs = serializer.NewCodecFactory(Scheme)
)

var codecsWithCBOR = serializer.NewCodecFactory(Scheme, serializer.WithSerializer(cbor.NewSerializerInfo))

// ResourceCodecs returns the codecs of resources' responses and of the APIResourceLists of built-in groups: Codecs,
// with CBOR if the gate is on (k8s.io/apiserver/pkg/server, NewDefaultAPIGroupInfo).
func ResourceCodecs() serializer.CodecFactory {
	if utilfeature.DefaultFeatureGate.Enabled(features.CBORServingAndStorage) {
		return codecsWithCBOR
	}
	return Codecs
}

func init() {
	metav1.AddToGroupVersion(Scheme, schema.GroupVersion{Version: "v1"})
	metav1.AddToGroupVersion(Scheme, schema.GroupVersion{Group: "meta.k8s.io", Version: "v1"})
	if err := metainternalversion.AddToScheme(Scheme); err != nil {
		panic(err)
	}
	Scheme.AddUnversionedTypes(schema.GroupVersion{Version: "v1"},
		&metav1.Status{},
		&metav1.APIVersions{},
		&metav1.APIGroupList{},
		&metav1.APIGroup{},
		&metav1.APIResourceList{},
	)
}

// Error writes err as a metav1.Status in the encoding that the client accepts.
func Error(w http.ResponseWriter, req *http.Request, gv schema.GroupVersion, err error) {
	responsewriters.ErrorNegotiated(err, Codecs, gv, w, req)
}

// ResourceError writes an error of a resource's request. It is Error with ResourceCodecs.
func ResourceError(w http.ResponseWriter, req *http.Request, gv schema.GroupVersion, err error) {
	responsewriters.ErrorNegotiated(err, ResourceCodecs(), gv, w, req)
}

// WriteObject writes an object of the gateway's own in the encoding of codecs that the client accepts.
func WriteObject(w http.ResponseWriter, req *http.Request, codecs runtime.NegotiatedSerializer, obj runtime.Object) {
	responsewriters.WriteObjectNegotiated(codecs, negotiation.DefaultEndpointRestrictions, V1, w, req, http.StatusOK,
		obj, false)
}

// NewFrameworkError returns the web framework's error for a request that no route serves: a Status with the reason of
// its code.
func NewFrameworkError(code int, message string) error {
	return apierrors.NewGenericServerResponse(code, "", schema.GroupResource{}, "",
		fmt.Sprintf("%d: %s", code, message), 0, false)
}

// PageNotFound is the web framework's error for an unknown path, and MethodNotAllowed for an unsupported method.
var (
	PageNotFound     = NewFrameworkError(http.StatusNotFound, "Page Not Found")
	MethodNotAllowed = NewFrameworkError(http.StatusMethodNotAllowed, "Method Not Allowed")
)

// V1 is the group version of a Status if the request has none.
var V1 = schema.GroupVersion{Version: "v1"}

// Acceptable reports whether the web framework accepts an Accept header, which it checks first. The header must contain
// a served media type, with any parameters, or */*.
func Acceptable(accept string, types []string) bool {
	if accept == "" {
		return true
	}
	for a := range strings.SplitSeq(accept, ",") {
		t, _, _ := strings.Cut(a, ";")
		if t = strings.TrimSpace(t); t == "*/*" || slices.Contains(types, t) {
			return true
		}
	}
	return false
}

// NewNotAcceptable returns the web framework's error for an Accept header without a served media type.
func NewNotAcceptable(types []string) error {
	return apierrors.NewGenericServerResponse(http.StatusNotAcceptable, "", schema.GroupResource{}, "",
		"406: Not Acceptable\n\nAvailable representations: "+strings.Join(types, ", "), 0, false)
}

// WriteUnversioned writes a document in its Kubernetes 1.0 form, without an apiVersion.
func WriteUnversioned(w http.ResponseWriter, req *http.Request, obj runtime.Object) {
	types, _ := negotiation.MediaTypesForSerializer(Codecs)
	if !Acceptable(req.Header.Get("Accept"), types) {
		Error(w, req, V1, NewNotAcceptable(types))
		return
	}
	m, info, err := negotiation.NegotiateOutputMediaType(req, Codecs, negotiation.DefaultEndpointRestrictions)
	if err != nil {
		Error(w, req, V1, err)
		return
	}
	s := info.Serializer
	if m.Pretty && info.PrettySerializer != nil {
		s = info.PrettySerializer
	}
	if audit.IncludesResponse(req.Context()) {
		if data, err := json.Marshal(obj); err == nil {
			audit.RecordResponse(req.Context(), runtime.ContentTypeJSON, data)
		}
	}
	w.Header().Set("Content-Type", info.MediaType)
	_ = s.Encode(obj, w)
}

// NotFound writes the response for a path that no server handles.
func NotFound(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "404 page not found", http.StatusNotFound)
}

// WithAbort returns a context for a request whose handler may call Abort, and a function that reports whether it did.
func WithAbort(ctx context.Context) (context.Context, func() bool) {
	var aborted atomic.Bool
	return context.WithValue(ctx, abortKey{}, &aborted), aborted.Load
}

type abortKey struct{}

// Abort marks the response of ctx's request as aborted. The server breaks the response off after the handler has
// returned. The reason is that the client does not read it, or must not take it for a complete response. The audit log
// records the response as sent, unlike after a panic.
func Abort(ctx context.Context) {
	if aborted, ok := ctx.Value(abortKey{}).(*atomic.Bool); ok {
		aborted.Store(true)
	}
}
