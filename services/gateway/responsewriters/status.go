// Package answer writes what the gateway itself says: statuses, discovery's objects, and refusals in the words of
// kube-apiserver's web framework. What resources answer is written by package body.
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
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"

	"watershed.dev/services/gateway/audit"
)

// Codecs encode what the gateway itself says.
var (
	Scheme = runtime.NewScheme()
	Codecs = serializer.NewCodecFactory(Scheme)
)

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

// Error answers err as a metav1.Status in the encoding that the client accepts.
func Error(w http.ResponseWriter, req *http.Request, gv schema.GroupVersion, err error) {
	responsewriters.ErrorNegotiated(err, Codecs, gv, w, req)
}

// WriteObject answers one of the gateway's own objects.
func WriteObject(w http.ResponseWriter, req *http.Request, code int, obj runtime.Object) {
	responsewriters.WriteObjectNegotiated(Codecs, negotiation.DefaultEndpointRestrictions, V1, w, req, code, obj, false)
}

// NewFrameworkError is what kube-apiserver's web framework says of a request that no resource takes: a Status with the code's own
// name.
func NewFrameworkError(code int, message string) error {
	return apierrors.NewGenericServerResponse(code, "", schema.GroupResource{}, "",
		fmt.Sprintf("%d: %s", code, message), 0, false)
}

// PageNotFound is what the web framework says of a path that it does not have, and MethodNotAllowed of a method.
var (
	PageNotFound     = NewFrameworkError(http.StatusNotFound, "Page Not Found")
	MethodNotAllowed = NewFrameworkError(http.StatusMethodNotAllowed, "Method Not Allowed")
)

// V1 is the group version that a Status is written in where the request is for none.
var V1 = schema.GroupVersion{Version: "v1"}

// Acceptable is what kube-apiserver's web framework asks of Accept before anything else does: one media type that is
// among those served, whatever its parameters, or */*.
func Acceptable(accept string, types []string) bool {
	if accept == "" {
		return true
	}
	for _, a := range strings.Split(accept, ",") {
		t, _, _ := strings.Cut(a, ";")
		if t = strings.TrimSpace(t); t == "*/*" || slices.Contains(types, t) {
			return true
		}
	}
	return false
}

// NewNotAcceptable is its answer where there is none.
func NewNotAcceptable(types []string) error {
	return apierrors.NewGenericServerResponse(http.StatusNotAcceptable, "", schema.GroupResource{}, "",
		"406: Not Acceptable\n\nAvailable representations: "+strings.Join(types, ", "), 0, false)
}

// WriteUnversioned answers one of the oldest documents, which are as Kubernetes 1.0 had them: without an apiVersion.
func WriteUnversioned(w http.ResponseWriter, req *http.Request, obj runtime.Object) {
	var types []string
	for _, m := range Codecs.SupportedMediaTypes() {
		types = append(types, m.MediaType)
	}
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

// NotFound is the answer to a path that nothing serves.
func NotFound(w http.ResponseWriter, _ *http.Request) {
	http.Error(w, "404 page not found", http.StatusNotFound)
}

// WithAbort is ctx of a request whose handler may Abort, and says whether it has.
func WithAbort(ctx context.Context) (context.Context, func() bool) {
	var aborted atomic.Bool
	return context.WithValue(ctx, abortKey{}, &aborted), aborted.Load
}

type abortKey struct{}

// Abort has the answer of ctx's request end as broken off once its handler has returned: its client does not take what
// it has, or must not take it for the whole. To the audit log it has been answered, unlike where a handler panics.
func Abort(ctx context.Context) {
	if aborted, ok := ctx.Value(abortKey{}).(*atomic.Bool); ok {
		aborted.Store(true)
	}
}
